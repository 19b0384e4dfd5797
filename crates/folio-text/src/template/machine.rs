//! A template as the engine's instructions, with a charge before each one that can make more than it takes.
//!
//! The engine counts instructions (its fuel), but one instruction may double a text, repeat a list or compare
//! everything with everything. So its instructions are rewritten: what writes, joins, repeats, compares, cuts, unpacks or
//! builds is preceded or followed by a filter of ours ([`guards`]) that charges the rendering's [`Meter`], or refuses.
//! Filters, tests, functions and methods are wrapped one by one (`functions`).
//!
//! Invariants: rewriting changes no value and no order of evaluation; jumps lead to where they led, before the charge of
//! the instruction there. Nothing is included, imported or extended: the environment has no templates.
//!
//! Cost: a compiled template lives as long as the process (its source is leaked: the engine's instructions borrow it).
//!
//! [`Meter`]: super::meter::Meter
//! [`guards`]: super::guards

use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Token, eval, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::meter::meter;

/// The variable that says whether the assistant's turn is to begin.
const ANSWER: &str = "add_generation_prompt";
/// Longest source of a template, bytes.
const SOURCE_MAX: usize = 4 << 20;
/// Parts of one tag: an expression is compiled by recursion.
const TAG_TOKENS_MAX: usize = 10_000;
/// What one tag may come to when everything constant in it is computed, bytes or elements.
const CONSTANT_MAX: u128 = 1 << 20;
/// For that recursion; only what is used of it is memory.
const COMPILE_STACK: usize = 256 << 20;

/// What a template wrote.
pub(super) struct Rendered {
    pub text: String,
    /// Bytes that do not depend on whether the assistant's turn is to begin: written before the template first asked.
    pub before_answer: usize,
}

pub(super) struct Machine {
    instructions: Instructions<'static>,
    source: &'static str,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Machine {
    pub(super) fn compile(name: &str, source: String, syntax: SyntaxConfig) -> Result<Self, Error> {
        check(&source, syntax.clone())?;
        let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
        let source: &'static str = Box::leak(source.into_boxed_str());
        let compile = move || -> Result<Self, Error> {
            let config =
                TemplateConfig { syntax_config: syntax, default_auto_escape: Arc::new(|_| AutoEscape::None) };
            let compiled = CompiledTemplate::new(name, source, &config)?;
            let instructions = rewrite(&compiled.instructions);
            let blocks = compiled.blocks.iter().map(|(name, block)| (*name, rewrite(block))).collect();
            Ok(Self { instructions, source, blocks })
        };
        let failed = |_| Error::new(ErrorKind::InvalidOperation, "it could not be compiled");
        let thread = std::thread::Builder::new().name("compile-template".into()).stack_size(COMPILE_STACK);
        thread.spawn(compile).map_err(|_| failed(()))?.join().map_err(|_| failed(()))?
    }

    pub(super) fn source(&self) -> &'static str {
        self.source
    }

    pub(super) fn render(
        &self,
        environment: &Environment<'static>,
        variables: Value,
    ) -> Result<Rendered, Error> {
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let rendered =
            eval(environment, &self.instructions, variables, &self.blocks, &mut output, AutoEscape::None);
        let (_, mut state) = rendered?;
        let instructions = state.fuel_levels().map_or(0, |(done, _)| done as usize);
        let (behind, steps) = (meter(&mut state).behind_asking(), meter(&mut state).steps());
        crate::work::add(instructions + steps);
        drop(state);
        let before_answer = text.floor_char_boundary(text.len().saturating_sub(behind));
        Ok(Rendered { text, before_answer })
    }
}

/// Refuses what compiling itself would take too much for.
fn check(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let refuse = |what: String| Err(Error::new(ErrorKind::SyntaxError, what));
    if source.len() > SOURCE_MAX {
        return refuse(format!("it has {} bytes, more than {SOURCE_MAX}", source.len()));
    }
    let mut tag = Tag::default();
    for token in tokenize(source, false, syntax) {
        let (token, span) = token?;
        match token {
            Token::VariableStart | Token::BlockStart => tag = Tag::default(),
            Token::VariableEnd | Token::BlockEnd | Token::TemplateData(_) => {}
            token => tag.see(&token),
        }
        if tag.tokens > TAG_TOKENS_MAX {
            return refuse(format!(
                "the tag in line {} has more than {TAG_TOKENS_MAX} parts",
                span.start_line
            ));
        }
        if tag.multiplies && tag.texts.saturating_mul(tag.factors) > CONSTANT_MAX {
            return refuse(format!("line {} repeats a constant more than it may", span.start_line));
        }
    }
    Ok(())
}

/// What a tag's constants may come to, at most.
#[derive(Debug)]
struct Tag {
    tokens: usize,
    texts: u128,
    factors: u128,
    multiplies: bool,
}

impl Default for Tag {
    fn default() -> Self {
        Self { tokens: 0, texts: 0, factors: 1, multiplies: false }
    }
}

impl Tag {
    fn see(&mut self, token: &Token<'_>) {
        self.tokens += 1;
        let mut factor = |n: u128| self.factors = self.factors.saturating_mul(n.max(1));
        match token {
            Token::Str(text) => self.texts += text.len() as u128,
            Token::String(text) => self.texts += text.len() as u128,
            Token::BracketOpen | Token::ParenOpen | Token::Comma => self.texts += 1,
            Token::Int(n) => factor(u128::from(*n)),
            Token::Int128(n) => factor(**n),
            Token::Mul => self.multiplies = true,
            // Of constants it may be anything.
            Token::Pow => factor(1 << 64),
            _ => {}
        }
    }
}

/// A call of one of [`super::guards`] with the top `count` values, whose result takes their place.
fn guard(name: &'static str, count: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(name, Some(count), !0)
}

/// A guard that gives back the values it took, all of them.
fn pass(name: &'static str, count: u16) -> [Instruction<'static>; 2] {
    [guard(name, count), Instruction::UnpackList(usize::from(count))]
}

fn rewrite(old: &Instructions<'static>) -> Instructions<'static> {
    let mut new = Instructions::new(old.name(), old.source());
    let mut moved = Vec::new();
    let mut at = 0;
    let mut total = 0u32;
    while let Some(instruction) = old.get(at) {
        moved.push(total);
        let before = at.checked_sub(1).and_then(|at| old.get(at));
        for instruction in guarded(instruction, before, old.get(at + 1)) {
            total += 1;
            match (old.get_span(at), old.get_line(at)) {
                (Some(span), _) => new.add_with_span(instruction, span),
                (None, line) => {
                    new.add_with_line(instruction, line.unwrap_or(0).min(usize::from(u16::MAX)) as u16)
                }
            };
        }
        at += 1;
    }
    moved.push(total);
    for at in 0..total {
        if let Some(
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _),
        ) = new.get_mut(at)
        {
            *target = moved.get(*target as usize).copied().unwrap_or(total);
        }
    }
    new
}

fn guarded(
    instruction: &Instruction<'static>,
    before: Option<&Instruction<'static>>,
    behind: Option<&Instruction<'static>>,
) -> Vec<Instruction<'static>> {
    use Instruction as I;
    let same = || instruction.clone();
    let both = |name| {
        let [guard, unpack] = pass(name, 2);
        vec![guard, unpack, same()]
    };
    let all = |count: usize| {
        let [guard, unpack] = pass("!shallow", count.min(usize::from(u16::MAX)) as u16);
        vec![guard, unpack, same()]
    };
    match instruction {
        // Text of the template is written as a value is, by the formatter, which charges; it is never escaped.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
        I::Add => [both("!add"), vec![guard("!list", 1)]].concat(),
        I::Mul => [both("!mul"), vec![guard("!list", 1)]].concat(),
        I::StringConcat => both("!concat"),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => both("!compare"),
        I::In => both("!in"),
        I::CompareAndPreserve(_) => both("!in"),
        I::SetAttr(_) => both("!set"),
        // A key that is a text finds nothing in a text.
        I::GetItem => match before {
            Some(I::LoadConst(key)) if key.as_str().is_some() => vec![same()],
            _ => both("!item"),
        },
        I::Slice => {
            let [guard_all, unpack] = pass("!slice", 4);
            vec![guard_all, unpack, same(), guard("!list", 1)]
        }
        I::BuildList(_) | I::BuildTuple(_) | I::BuildMap(_) => vec![same(), guard("!built", 1)],
        I::MergeKwargs(count) | I::UnpackLists(count) => all(*count),
        I::UnpackList(_) => vec![guard("!unpack", 1), same()],
        I::PushLoop(_) => vec![guard("!walk", 1), same()],
        // It is always defined.
        I::Lookup(ANSWER) if matches!(behind, Some(I::PerformTest("defined" | "undefined", ..))) => {
            vec![same()]
        }
        I::Lookup(ANSWER) => vec![same(), guard("!asked", 1)],
        // A macro that will ask.
        I::Enclose(ANSWER) => vec![I::LoadConst(Value::from(0)), guard("!asked", 1), I::DiscardTop, same()],
        _ => vec![same()],
    }
}
