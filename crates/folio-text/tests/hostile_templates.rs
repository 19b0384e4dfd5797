//! Templates that want to end the process: each ends with a clear error, having made a bounded amount of memory.
//!
//! The bound is asserted by an allocator that counts what is held; time is counted in the template's own limits.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use folio_text::{AnswerFormats, ChatInput, ChatTemplate, SpecialTokens, TemplateSources, TextError};
use serde_json::{Value, json};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One at a time: the count is the process's.
static TURN: Mutex<()> = Mutex::new(());

/// Twice the 256 MiB that may be made: text is written once more at the end, and buffers grow by doubling.
const MEMORY_MAX: usize = 640 << 20;

fn compile(source: &str) -> Result<ChatTemplate, TextError> {
    let mut sources = TemplateSources::default();
    sources.add("default", source, "test");
    ChatTemplate::compile(sources, &SpecialTokens::default()).map(|template| template.expect("one"))
}

fn render(source: &str, content: &str) -> Result<String, TextError> {
    let messages: [Value; 1] = [json!({"role": "user", "content": content})];
    let prompt = compile(source)?.render(&ChatInput {
        messages: &messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: &serde_json::Map::new(),
        now_unix_s: 0,
        formats: AnswerFormats::default(),
    })?;
    Ok(prompt.into_text())
}

/// Why it failed, and the most bytes it held meanwhile.
fn attacked(source: &str) -> (String, usize) {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let error = match render(source, "hello") {
        Ok(text) => panic!("{source} rendered {} bytes", text.len()),
        Err(error) => error.to_string(),
    };
    (error, MOST.load(Ordering::Relaxed) - before)
}

fn all_end(reasons: &[&str], sources: &[&str]) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for source in sources {
        let (error, held) = attacked(source);
        assert!(reasons.iter().any(|reason| error.contains(reason)), "{source}: {error}");
        assert!(held < MEMORY_MAX, "{source}: held {held} bytes");
        assert!(error.len() < 2000, "{source}: the error itself has {} bytes", error.len());
    }
}

const LOOP: &str = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}";

#[test]
fn doubling_ends() {
    let doubled =
        |expression: &str| format!("{LOOP}{{% set ns.x = {expression} %}}{{% endfor %}}{{{{ ns.x }}}}");
    let sources = [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x * 2",
        "2 * ns.x",
        "'%s%s' | format(ns.x, ns.x)",
        "'{}{}'.format(ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "[ns.x, ns.x] | join",
        "[ns.x, ns.x] | join(ns.x)",
        "ns.x.join([ns.x, ns.x, ns.x])",
        "ns.x | replace('a', 'aa') | replace('b', 'bb') ~ ns.x",
        "ns.x.replace('a', ns.x)",
        "ns.x | replace('', ns.x)",
        "ns.x | upper ~ ns.x | lower",
        "ns.x | e ~ ns.x | urlencode if false else ns.x ~ ns.x",
        "[ns.x, ns.x] | tojson",
        "[ns.x, ns.x] | string",
        "(ns.x ~ '\\n' ~ ns.x) | indent(8)",
        "ns.x[:] ~ ns.x[::-1]",
        "ns.x | list | join('ab')",
        "(ns.x ~ 'a').split('a') | join('aaa')",
        "ns.x | reverse ~ ns.x | title ~ ns.x | capitalize ~ ns.x | trim",
    ]
    .map(doubled);
    all_end(
        &["makes more text than it may", "ran for too long", "string is too large"],
        &sources.iter().map(String::as_str).collect::<Vec<_>>(),
    );
}

#[test]
fn lists_that_grow_end() {
    let doubled = |expression: &str| {
        format!(
            "{{% set ns = namespace(x=[1, 2]) %}}{{% for i in range(99) %}}{{% set ns.x = {expression} %}}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let sources = [
        "ns.x + ns.x",
        "ns.x * 3",
        "3 * ns.x",
        "ns.x | list + ns.x | list",
        "ns.x | map('string') | list + ns.x",
        "ns.x | chain(ns.x) | list",
        "[ns.x, ns.x]",
        "(ns.x, ns.x)",
        "{'a': ns.x, 'b': ns.x}",
        "dict(a=ns.x, b=ns.x)",
        "[ns.x]",
        "(ns.x, )",
        "ns.x | batch(1) | list + ns.x",
        "ns.x | sort + ns.x",
        "[ns.x, ns.x] | sum(start=[])",
        "ns.x[:] + ns.x[::-1]",
        "ns.x | zip(ns.x) | list",
        "(ns.x | tojson) | list + [1]",
    ]
    .map(doubled);
    all_end(
        &["makes more text than it may", "ran for too long", "puts values into values"],
        &sources.iter().map(String::as_str).collect::<Vec<_>>(),
    );
}

#[test]
fn single_steps_that_ask_for_much_end() {
    all_end(
        &[
            "makes more text than it may",
            "ran for too long",
            "too large",
            "too many",
            "repeats a constant",
            "more than",
            "invalid",
        ],
        &[
            "{{ 'a' * 99999999 ~ 'a' * 99999999 ~ 'a' * 99999999 }}",
            "{{ 'a' * 10**8 }}",
            "{% set n = 99999999 %}{{ 'a' * n ~ 'b' * n ~ 'c' * n ~ 'd' * n }}",
            "{% set n = 99999999 %}{{ [1] * n }}",
            "{% set n = 99999 %}{{ [1] * n * n * n }}",
            "{% set n = 99999 %}{{ (([1] * n) * n) | length }}{{ (([1] * n) * n)[n * n // 2] }}",
            "{{ 'a' | indent(99999999999) }}",
            "{{ 'a' | indent(width=99999999999) }}",
            "{{ ('a\n' * 99999) | indent(99999) }}",
            "{{ '%999999999d' | format(1) }}",
            "{{ '%*d' | format(999999999, 1) }}",
            "{{ '{:999999999}'.format(1) }}",
            "{{ '{:>{}}'.format(1, 999999999) }}",
            "{{ '%.999999999f' | format(1.5) }}",
            "{{ [1] | batch(999999999, 'x') | list }}",
            "{{ [1] | slice(999999999) | list }}",
            "{{ [1] | slice(999999999, 'x') | list }}",
            "{{ [[[1]]] | tojson(indent='x' * 99999999) }}",
            "{{ [1, 2] | tojson(separators=('x' * 9999999 * 9, 'y' * 99999999)) * 9 }}",
            "{% set s = 'x' * 999999 %}{{ range(9999) | list | tojson(separators=(s, s)) }}",
            "{% set s = 'x' * 999999 %}{{ range(9999) | list | tojson(indent=s) }}",
            "{% set n = 99999 %}{% set a, b = [1] * n * n %}",
            "{% set n = 99999 %}{{ namespace(*([1] * n * n)) }}",
            "{{ range(99999) | map('string') | map('replace', '', 'x' * 9999) | join }}",
            "{% set l = range(99999) | list %}{% for i in range(99999) %}{% if [l] == [l, 1] or l in [l, l] %}{% endif %}{% endfor %}",
            "{% set l = range(99999) | list %}{% for i in range(99999) %}{% if 1.5 in l %}{% endif %}{% endfor %}",
            "{% set s = 'ab' * 400000 %}{% for i in range(99999) %}{% if s == s ~ 'a' %}{% endif %}{% endfor %}",
            "{% set s = 'ab' * 400000 %}{% for i in range(99999) %}{% if 'abb' in s %}{% endif %}{% endfor %}",
            "{% set s = 'ab' * 400000 %}{% for i in range(99999) %}{{ s[-1] }}{{ s.find('bb') }}{% endfor %}",
            "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ l | sort | first }}{% endfor %}",
            "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ l | unique | first }}{{ l | sum }}{% endfor %}",
        ],
    );
}

#[test]
fn output_ends() {
    let long = "y".repeat(100_000);
    let literal = format!("{{% for i in range(99999) %}}{long}{{% endfor %}}");
    all_end(
        &["makes more text than it may", "ran for too long"],
        &[
            &literal,
            "{% set s = 'ab' * 400000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
            "{% set s = 'ab' * 400000 %}{% set b %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
            "{% set s = 'ab' * 400000 %}{% filter upper %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endfilter %}",
            "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
            "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}{% endfor %}",
            "{% for i in range(99999) %}{{ messages }}{{ range(9999) | list }}{% endfor %}",
            "{% block b %}{% for i in range(99999) %}{{ messages }}{{ range(9999) | list }}{% endfor %}{% endblock %}",
            "{% autoescape true %}{% set s = '<' * 800000 %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endautoescape %}",
        ],
    );
}

#[test]
fn recursion_and_circles_end() {
    all_end(
        &[
            "recursion",
            "namespace in",
            "puts values into values",
            "ran for too long",
            "makes more text",
            "not found",
            "not exist",
            "unknown",
        ],
        &[
            "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
            "{% macro m(n) %}{{ m(n + 1) ~ m(n + 1) }}{% endmacro %}{{ m(0) }}",
            "{% for x in [[[]]] recursive %}{{ loop([[x]]) }}{% endfor %}",
            "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.x = dict(a=ns) %}{{ ns }}",
            "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}",
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = dict(a=ns.x) %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x | batch(2) | list %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x | slice(1) | list %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x | zip %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99999) %}{% set ns.x = dict(ns.x.items()) if false else {'a': ns.x.items()} %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[{'a': 1}]) %}{% for i in range(99999) %}{% set ns.x = ns.x | groupby('a') | list %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] | map('list') | list %}{% endfor %}{{ ns.x }}",
            "{% include 'default' %}",
            "{% extends 'default' %}",
            "{% import 'default' as x %}",
            "{{ debug() }}",
        ],
    );
}

#[test]
fn sources_are_bounded() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let chain = format!("{{{{ x{} }}}}", "~x".repeat(200_000));
    let nested = format!("{{{{ {}x{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    let lists = format!("{{{{ {}{} }}}}", "[".repeat(100_000), "]".repeat(100_000));
    let ifs = "{% if x %}".repeat(100_000);
    let long = "x".repeat(5 << 20);
    for source in [&chain, &nested, &lists, &ifs, &long] {
        let error = compile(source).expect_err("refused").to_string();
        assert!(
            ["parts", "recursion", "bytes, more than"].iter().any(|why| error.contains(why)),
            "{error:.300}"
        );
    }
    // As long as an expression may be.
    let chain = format!("{{{{ x{} }}}}", "~x".repeat(4_000));
    assert_eq!(render(&chain, "").expect("renders"), "");
}

/// What real templates do with long conversations is far from the limits.
#[test]
fn honest_templates_have_room() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let source = "{% set ns = namespace(text='') %}{% for i in range(400) %}{% set ns.text = ns.text + messages[0].content.strip() %}\
        {{ messages[0]['content'] | trim }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% endfor %}{{ ns.text }}";
    let content = "word ".repeat(200);
    let text = render(source, &content).expect("renders");
    assert_eq!(text.len(), 400 * (2 * (content.len() - 1) + 1));
}
