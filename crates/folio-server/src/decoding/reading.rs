//! How an answer is read: which parser applies, where it begins, and what is put into the prompt for it.
//!
//! Invariants: a request for tools is refused where it could not be honoured: without a parser for the model's calls, or
//! a template that shows no tools. `tool_choice: required` and a named function hold by construction: behind the reasoning nothing but calls
//! can be chosen, or, where calls have no grammar, nothing but the beginning of one; for a model that does not think the prompt ends with the
//! beginning of one (up to the name, or to the arguments), and the parser reads on from there. Control tokens that a
//! parser looks for stay in the text although others are left out.

use std::collections::HashSet;
use std::sync::Arc;

use folio_api::constraint::Constraint;
use folio_api::conversation::Conversation;
use folio_api::params::fresh_seed;
use folio_api::tools::{ToolChoice, ToolUse};
use folio_api::{ApiError, Parsers};
use folio_text::{
    CallableFunction, ForcedPrefix, Grammar, OutputParser, ParserSetup, ReasoningFormat, Syntax, Tokenizer,
    ToolFormat,
};

use crate::decoding::bounds::ReasoningMarks;
use crate::decoding::follower::{Begin, Form};
use crate::decoding::structured::Compiler;

/// What gpt-oss writes before its answer, one after the other.
const HARMONY_ANSWER: [&str; 2] = ["<|channel|>final", "<|message|>"];

/// What is known about reading once the model is.
pub struct Readers {
    parsers: Parsers,
    /// Control tokens to keep, with and without tools.
    markers: [Arc<HashSet<u32>>; 2],
    /// The token that opens reasoning, or that nothing but its opening begins with.
    opening: Option<u32>,
}

/// How one request's answers are read.
#[derive(Clone, Debug)]
pub struct Reading {
    setup: ParserSetup,
    /// The part of the prompt that belongs to the answer.
    begun: String,
    /// It is the beginning of a call.
    begins_call: bool,
    markers: Arc<HashSet<u32>>,
    pub include_reasoning: bool,
}

/// What [`Readers::plan`] decides by.
pub struct ReadingInput<'a> {
    pub tools: &'a ToolUse,
    /// The rendered conversation.
    pub prompt: &'a str,
    /// The prompt ends with this beginning of the answer.
    pub continued: Option<&'a str>,
    /// The prompt ends with the header of the assistant's turn.
    pub generation_prompt: bool,
    pub include_reasoning: bool,
}

/// Calls that are held to their functions' schemas, because of `param`.
struct CallGrammars<'a> {
    format: &'static ToolFormat,
    tools: &'a ToolUse,
    tokenizer: &'a Tokenizer,
    compiler: Compiler<'a>,
    param: &'a str,
}

impl CallGrammars<'_> {
    /// `why`: they cannot be held where there is no syntax.
    fn compile(&self, syntax: Option<Syntax>, why: &str) -> Result<Arc<Grammar>, ApiError> {
        let syntax = syntax.ok_or_else(|| ApiError::unsupported(self.param, why))?;
        self.compiler.compile(&Constraint::new(syntax, self.param.to_owned()))
    }

    /// An answer that is calls, which the model writes itself.
    fn only(&self, callees: &[CallableFunction]) -> Result<Form, ApiError> {
        let syntax = self.format.only_calls(callees, self.tools.parallel, self.tokenizer);
        Ok(Form::Answer(self.compile(syntax, "how this model writes calls cannot be held to a form")?))
    }

    /// An answer that begins a call, which is then written as the model likes: for formats whose calls have no grammar.
    fn begun(&self, callees: &[CallableFunction]) -> Result<Form, ApiError> {
        Ok(Form::Opening(self.compile(Some(self.format.begun_call(callees, self.tokenizer)), "")?))
    }

    /// An answer that may have calls.
    fn among_text(&self, callees: &[CallableFunction]) -> Result<Form, ApiError> {
        let Self { format, tools, .. } = self;
        let why = format!(
            "how this model writes calls ({}) cannot be held to a schema; leave it out or send false",
            format.name
        );
        let place = format.place().ok_or_else(|| ApiError::unsupported(self.param, &why))?;
        let compile = |begun, callees: &[CallableFunction]| {
            self.compile(format.calls(callees, begun, tools.parallel, self.tokenizer), &why)
        };
        let begun = match &tools.choice {
            ToolChoice::Named(name) => {
                let only: Vec<CallableFunction> =
                    callees.iter().filter(|callee| callee.name == *name).cloned().collect();
                Some(compile(ForcedPrefix::Arguments, &only)?)
            }
            ToolChoice::Required => Some(compile(ForcedPrefix::Name, callees)?),
            _ => None,
        };
        Ok(Form::Calls { place, grammar: compile(ForcedPrefix::Trigger, callees)?, begun })
    }
}

impl Readers {
    pub fn new(parsers: Parsers, tokenizer: &Tokenizer) -> Self {
        let markers = |tools| {
            let setup = ParserSetup { tools, reasoning: parsers.reasoning, ..ParserSetup::default() };
            let kept = tokenizer.special_ids().filter(|id| {
                let text = String::from_utf8_lossy(tokenizer.token_bytes(*id));
                OutputParser::needs(&setup, &text)
            });
            Arc::new(kept.collect())
        };
        Self {
            parsers,
            markers: [markers(None), markers(parsers.tools)],
            opening: parsers.reasoning.and_then(|format| opening(format, tokenizer)),
        }
    }

    /// Where a structured answer, which `param` asks for, begins: behind the model's reasoning.
    pub fn begin(
        &self,
        param: &str,
        conversation: &Conversation,
        reading: Option<&Reading>,
    ) -> Result<Begin, ApiError> {
        if conversation.continue_final {
            return Err(ApiError::unsupported(param, "it cannot be combined with continue_final_message"));
        }
        let Some((reading, format)) = reading.and_then(|reading| Some((reading, reading.setup.reasoning?)))
        else {
            return Ok(Begin::default());
        };
        Ok(match format.harmony {
            true => Begin { after: HARMONY_ANSWER.into(), unless: None },
            false => self.behind_reasoning(reading),
        })
    }

    /// An answer that is what was wished for or else a call of one of the tools. Calls are held to the schemas of strict functions.
    pub fn answer_or_calls(
        &self,
        constraint: &Constraint,
        tools: &ToolUse,
        tokenizer: &Tokenizer,
    ) -> Result<Constraint, ApiError> {
        let why = "with tools that may be called it must ask for JSON, and the model write its calls as JSON, too; send \
                   tool_choice \"none\" where no call is wanted";
        let refused = || ApiError::unsupported(constraint.param(), why);
        let format = self.parsers.tools.ok_or_else(refused)?;
        let schema = constraint.schema().ok_or_else(refused)?;
        let callees = tools.callees().into_iter().map(|(_, callee)| callee).collect::<Vec<_>>();
        let syntax =
            format.calls_or_json(&callees, &schema, tools.parallel, tokenizer).ok_or_else(refused)?;
        Ok(Constraint::new(syntax, constraint.param().to_owned()))
    }

    /// What holds calls to their functions' schemas, and where in an answer it begins. `None`: nothing is held.
    pub fn calls(
        &self,
        tools: &ToolUse,
        reading: Option<&Reading>,
        tokenizer: &Tokenizer,
        compiler: Compiler<'_>,
    ) -> Result<Option<(Form, Begin)>, ApiError> {
        let (Some(format), Some(reading), Some(held)) = (self.parsers.tools, reading, tools.held()) else {
            return Ok(None);
        };
        let callees = |all: bool| {
            let callees = held.callees.iter().filter(|(_, callee)| tools.may_call(&callee.name)).cloned();
            let relaxed = |(strict, callee): (bool, CallableFunction)| match strict || all {
                true => callee,
                false => CallableFunction { schema: None, ..callee },
            };
            callees.map(relaxed).collect::<Vec<_>>()
        };
        let of = |param| CallGrammars { format, tools, tokenizer, compiler, param };
        // What cannot be held to its schema is held to being an object.
        if tools.must() && !reading.begins_call {
            let calls = of(held.param.as_deref().unwrap_or("tool_choice"));
            let form = calls.only(&callees(true)).or_else(|_| calls.only(&callees(false)));
            let form = form.or_else(|error| match held.param {
                None => calls.begun(&callees(false)),
                Some(_) => Err(error),
            })?;
            return Ok(Some((form, self.behind_reasoning(reading))));
        }
        let calls = of(held.param.as_deref().unwrap_or("tools"));
        let form = calls.among_text(&callees(true)).or_else(|_| calls.among_text(&callees(false)));
        if held.param.is_none() {
            // Nobody asked for it: what cannot be held at all is not.
            return Ok(form.ok().map(|form| (form, Begin::default())));
        }
        let closing =
            reading.setup.reasoning.filter(|_| reading.setup.inside_reasoning && !format.ends_reasoning);
        let after = closing.map(|reasoning| reasoning.close).into_iter().collect();
        Ok(Some((form?, Begin { after, unless: None })))
    }

    /// Where an answer begins that may be preceded by reasoning.
    fn behind_reasoning(&self, reading: &Reading) -> Begin {
        match reading.setup.reasoning {
            Some(format) if reading.setup.inside_reasoning => {
                Begin { after: [ReasoningMarks::of(format).close].into(), unless: None }
            }
            Some(format) => {
                Begin { after: Vec::new(), unless: self.opening.map(|token| (token, format.close)) }
            }
            None => Begin::default(),
        }
    }

    /// Whether a call that must be made waits until the model has thought: where it may think at all, and its reasoning ends before its calls
    /// begin.
    fn thinks_first(&self, format: &ToolFormat, inside: bool) -> bool {
        self.parsers.reasoning.is_some_and(|reasoning| {
            reasoning.harmony == format.harmony && (reasoning.harmony || inside || self.opening.is_some())
        })
    }

    /// How the answers are read, and the text to append to the prompt. `None`: the text is the answer.
    pub fn plan(&self, asked: &ReadingInput<'_>) -> Result<(Option<Reading>, String), ApiError> {
        let reasoning = self.parsers.reasoning;
        if !asked.include_reasoning && reasoning.is_none() {
            let why = "how this model marks its reasoning is not known; the server can be told (--reasoning-parser)";
            return Err(ApiError::unsupported("include_reasoning", why));
        }
        let tools = self.parsers.tools.filter(|_| asked.tools.shown().is_some());
        if tools.is_none() && reasoning.is_none() {
            return Ok((None, String::new()));
        }
        let named = match &asked.tools.choice {
            ToolChoice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        let must = named.is_some() || asked.tools.choice == ToolChoice::Required;
        let inside = reasoning.filter(|format| format.begins_inside(asked.prompt, asked.continued));
        let (mut appended, mut begun) = (String::new(), String::new());
        let (mut begins_call, mut inside_reasoning) = (false, inside.is_some());
        if let Some(format) = tools.filter(|_| must) {
            if !asked.generation_prompt {
                let message = "A call that must be made needs a prompt that ends with the assistant's turn: leave out \
                               'add_generation_prompt' and 'continue_final_message', or use \"auto\".";
                return Err(ApiError::invalid("tool_choice", message));
            }
            if self.thinks_first(format, inside.is_some()) {
                if let Some(harmony) = reasoning.filter(|reasoning| reasoning.harmony) {
                    // All that its messages begin with is one token, behind which it could as well answer.
                    begun = ReasoningMarks::of(harmony).open.to_owned();
                    inside_reasoning = true;
                }
            } else {
                // A call is begun for the model, so nothing is thought before it.
                if let Some(opened) =
                    inside.filter(|format| asked.prompt.trim_end().ends_with(format.open.trim_end()))
                {
                    appended = format!("{}\n\n", opened.close);
                }
                begun = format.opening(named);
                (begins_call, inside_reasoning) = (true, false);
            }
            appended.push_str(&begun);
        }
        let setup = ParserSetup {
            tools,
            reasoning,
            functions: Arc::new(asked.tools.functions()),
            inside_reasoning,
            id_seed: 0,
            calls_max: u32::from(named.is_some() || !asked.tools.parallel),
        };
        let markers = self.markers[usize::from(tools.is_some())].clone();
        let include_reasoning = asked.include_reasoning;
        let reading = Reading { setup, begun, begins_call, markers, include_reasoning };
        Ok((Some(reading), appended))
    }
}

impl Reading {
    /// Whether an answer may be over before the model ends it.
    pub fn ends_early(&self) -> bool {
        self.setup.calls_max > 0
    }

    /// A parser for one answer, which has read what the prompt begins of it.
    pub fn parser(&self, events: &mut Vec<folio_text::OutputEvent>) -> OutputParser {
        // Ids must differ between answers, also between those to equal requests with equal seeds.
        let mut parser = OutputParser::new(ParserSetup { id_seed: fresh_seed(), ..self.setup.clone() });
        parser.push(&self.begun, events);
        parser
    }

    /// How reasoning is marked, and whether the answer begins inside.
    pub fn reasoning(&self) -> Option<(&'static ReasoningFormat, bool)> {
        self.setup.reasoning.map(|format| (format, self.setup.inside_reasoning))
    }

    /// Whether reasoning is told apart.
    pub fn separates_reasoning(&self) -> bool {
        self.setup.reasoning.is_some()
    }

    /// Whether this control token stays in the text.
    pub fn keeps(&self, id: u32) -> bool {
        self.markers.contains(&id)
    }
}

/// The token that an answer opens its reasoning with: all of the mark, or a control token that the mark begins with.
fn opening(format: &ReasoningFormat, tokenizer: &Tokenizer) -> Option<u32> {
    let begins = |id: &u32| {
        let token = tokenizer.token_bytes(*id);
        !token.is_empty() && format.open.as_bytes().starts_with(token)
    };
    tokenizer.token_id(format.open).or_else(|| tokenizer.special_ids().find(begins))
}
