//! Grammars that a stranger sends cost in proportion to their length, or are refused, and so do the first steps of an answer that follows
//! one; of an answer, all steps cost in proportion to its length. The work from one size to twice that grows by no more than [`MOST`].
//! Grammars are compiled on threads of their own, so counted are the bytes that the whole process makes room for, and the
//! test is alone in its process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use folio_text::{Grammars, Syntax, Whitespace};
use serde_json::{Value, json};

/// Twice the input, and no more than so much of the work.
const MOST: f64 = 2.3;

struct Counting;

static ROOM: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ROOM.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ROOM.fetch_add(size as u64, Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A grammar of a size.
type Flood = (&'static str, fn(usize) -> Syntax);

fn json_of(schema: Value) -> Syntax {
    Syntax::Json { schema, whitespace: Whitespace::default() }
}

fn properties(n: usize) -> Value {
    let properties: serde_json::Map<String, Value> =
        (0..n).map(|at| (format!("p{at:04}"), json!({"type": "string"}))).collect();
    json!({"type": "object", "properties": properties})
}

fn nested(n: usize) -> Value {
    (0..n).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}))
}

fn rules(n: usize, first: &str, rule: impl Fn(usize) -> String) -> Syntax {
    Syntax::Grammar((0..n).map(rule).fold(first.to_owned(), |text, rule| text + &rule))
}

const FLOODS: [Flood; 20] = [
    ("JSON: properties", |n| json_of(properties(n))),
    ("JSON: lists in lists", |n| json_of(nested(n / 4))),
    ("JSON: choices", |n| {
        json_of(json!({"enum": (0..n).map(|at| format!("choice {at:04}")).collect::<Vec<_>>()}))
    }),
    ("JSON: anyOf", |n| json_of(json!({"anyOf": (0..n).map(|at| json!({"const": at})).collect::<Vec<_>>()}))),
    ("JSON: definitions", |n| {
        let definitions: serde_json::Map<String, Value> = (0..n)
            .map(|at| (format!("d{at}"), json!({"$ref": format!("#/$defs/d{}", (at + 1) % n)})))
            .collect();
        json_of(json!({"type": "object", "properties": {"a": {"type": "string"}}, "$defs": definitions}))
    }),
    ("JSON: a long pattern", |n| json_of(json!({"type": "string", "pattern": "(ab|cd)".repeat(n)}))),
    ("choices", |n| Syntax::Choice((0..n).map(|at| format!("choice {at:04}")).collect())),
    ("choices alike", |n| Syntax::Choice((0..n).map(|at| "a".repeat(at % 50) + &at.to_string()).collect())),
    ("a regular expression", |n| Syntax::Regex("(ab|cd)".repeat(n))),
    ("repetitions in repetitions", |n| Syntax::Regex(format!("{}a{}", "(".repeat(n), ")*".repeat(n)))),
    ("counted repetitions", |n| Syntax::Regex("(a{1,9}b?)".repeat(n / 2))),
    ("GBNF: rules", |n| {
        rules(n, "root ::= r0\n", |at| match at + 1 == n {
            true => format!("r{at} ::= \"end\"\n"),
            false => format!("r{at} ::= \"a{at}\" | r{}\n", at + 1),
        })
    }),
    ("GBNF: alternatives", |n| rules(n, "root ::= \"x\"", |at| format!(" | \"a{at}\" [a-z]"))),
    ("GBNF: repetitions", |n| rules(n, "root ::= \"x\"", |_| " (\"a\"+ \"b\"?)*".to_owned())),
    ("GBNF: a long text", |n| Syntax::Grammar(format!("root ::= \"{}\"\n", "a\\n".repeat(10 * n)))),
    ("GBNF: comments", |n| rules(10 * n, "root ::= \"x\"\n", |_| "# said\n".to_owned())),
    ("Lark: rules", |n| {
        rules(n, "start: r0\n", |at| match at + 1 == n {
            true => format!("r{at}: \"end\"\n"),
            false => format!("r{at}: \"a{at}\" | r{}\n", at + 1),
        })
    }),
    ("Lark: terminals", |n| {
        rules(n, "start: \"x\"", |at| format!(" | T{at}")).and(n, |at| format!("T{at}: /a{at}[bc]+/\n"))
    }),
    ("Lark: alternatives", |n| rules(n, "start: \"x\"", |at| format!(" | \"a{at}\" /[a-z]/"))),
    ("Lark: schemas", |n| {
        rules(n, "start: \"x\"", |at| format!(" | s{at}"))
            .and(n, |at| format!("s{at}: %json {{\"const\": {at}}}\n"))
    }),
];

trait And {
    /// With further rules.
    fn and(self, n: usize, rule: impl Fn(usize) -> String) -> Self;
}

impl And for Syntax {
    fn and(self, n: usize, rule: impl Fn(usize) -> String) -> Self {
        let Self::Grammar(text) = self else { return self };
        rules(n, &(text + "\n"), rule)
    }
}

/// A grammar, and the beginning of a long answer that it allows.
type Answer = (&'static str, fn() -> Syntax, fn(usize) -> String);

const ANSWERS: [Answer; 4] = [
    (
        "JSON: a list",
        || json_of(json!({"type": "array", "items": {"type": "integer"}})),
        |n| format!("[{}", "7,".repeat(n)),
    ),
    ("JSON: a text", || json_of(json!({"type": "string"})), |n| format!("\"{}", "ab".repeat(n))),
    ("a regular expression", || Syntax::Regex("(ab|cd)*".into()), |n| "abcd".repeat(n / 2)),
    ("Lark: a list", || Syntax::Grammar("start: item*\nitem: \"a\" /[0-9]/\n".into()), |n| "a1".repeat(n)),
];

/// Bytes that `run` made room for.
fn room<T>(run: impl FnOnce() -> T) -> (u64, T) {
    let before = ROOM.load(Relaxed);
    let done = run();
    (ROOM.load(Relaxed) - before, done)
}

#[test]
fn grammars_are_compiled_and_followed_in_proportion_or_refused() {
    let tokenizer = common::tokenizer();
    let grammars = Grammars::new(&tokenizer, &[common::EOS]).unwrap();
    for (what, syntax, answer) in ANSWERS {
        let grammar = grammars.compile(&syntax()).unwrap();
        let counted = |size: usize| {
            let answer = answer(size);
            let follow = || {
                let (mut matcher, mut allowed) = (grammar.matcher(), Vec::new());
                for token in answer.bytes().map(u32::from) {
                    matcher.allowed(&mut allowed).unwrap();
                    // As a draft, too.
                    let mut ahead = matcher.ahead();
                    ahead.accept(token).unwrap();
                    ahead.allowed(&mut allowed).unwrap();
                    matcher.give_back(ahead);
                    matcher.accept(token).unwrap();
                }
            };
            room(follow).0
        };
        let (single, double) = (counted(500), counted(1000));
        let ratio = double as f64 / single as f64;
        println!("{what:30} followed {single:10} {double:10} {ratio:.2}");
        assert!(ratio <= MOST, "{what}: {single} and {double} bytes to follow it, {ratio:.2} times");
    }
    for (what, flood) in FLOODS {
        let counted = |size: usize| {
            let syntax = flood(size);
            let (bytes, compiled) = room(|| grammars.compile(&syntax));
            // What a first answer's first steps look at.
            let followed = compiled.as_ref().ok().map(|grammar| {
                let first = || {
                    let (mut matcher, mut allowed) = (grammar.matcher(), Vec::new());
                    matcher.allowed(&mut allowed).unwrap();
                };
                room(first).0
            });
            (bytes, followed, compiled.err())
        };
        counted(50);
        let ((single, followed, no), (double, followed_double, not)) = (counted(100), counted(200));
        let ratio = double as f64 / single as f64;
        println!(
            "{what:30} {single:10} {double:10} {ratio:.2}  {followed:?} {followed_double:?} {no:?} {not:?}"
        );
        assert!(ratio <= MOST || not.is_some(), "{what}: {single} and {double} bytes, {ratio:.2} times");
        if let (Some(single), Some(double)) = (followed, followed_double) {
            let ratio = double as f64 / single as f64;
            assert!(ratio <= MOST, "{what}: {single} and {double} bytes for a first step, {ratio:.2} times");
        }
    }
}
