//! The formats in which models write tool calls, as a table. A family is a row: what opens a call, what follows, what
//! closes it, and how a call is begun for the model when it must make one.
//!
//! Owns: every marker and name of a format. Must never: look at text; that is the machine's work. Adding a family means
//! adding a row (and its example to `tests/common/answers.rs`).

use super::literal::LiteralDialect;

/// Longest name of a function, bytes.
pub const NAME_MAX: usize = 256;

/// One thing in the text of a call. White space before it is skipped.
#[derive(Clone, Copy, Debug)]
pub enum Piece {
    /// Exactly this.
    Lit(&'static str),
    /// The function's name: letters, digits and `_-.:/`.
    Name,
    /// The same as Kimi writes it, which is also the call's id: `functions.NAME:INDEX`.
    NumberedName,
    /// The call's id.
    Id,
    /// The arguments: a JSON object.
    Json,
    /// `{"name": NAME, "arguments": {...}}`
    Envelope,
    /// The arguments, each between markers.
    Markup(&'static Markup),
    /// A whole call as a literal.
    Literal(LiteralDialect),
}

/// Arguments between markers.
#[derive(Debug)]
pub struct Markup {
    /// Before a key.
    pub open: &'static str,
    /// After a key, before its value; which one it is may say what the value is.
    pub value: &'static [(&'static str, ArgumentForm)],
    /// After a value.
    pub close: &'static str,
    /// After the last value.
    pub end: &'static str,
    /// One newline after `value` and one before `close` belong to the markup.
    pub newlines: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentForm {
    /// The function's schema knows.
    BySchema,
    Text,
    Json,
}

/// One way of writing calls.
#[derive(Debug)]
pub struct Shape {
    /// What begins a section of calls; at least one.
    pub open: &'static [&'static str],
    /// `open` begins calls only where nothing but white space came before, is itself part of the call, and only calls
    /// of the request's own functions count: formats without markers of their own look like ordinary text.
    pub bare: bool,
    /// Once, after `open`.
    pub begin: &'static [Piece],
    /// For each call.
    pub call: &'static [Piece],
    /// A section may hold several calls.
    pub several: bool,
    /// Between calls; may be left out.
    pub separators: &'static [&'static str],
    /// What ends the section; may be missing in the text. Empty: the section ends where no further call begins.
    pub close: &'static [&'static str],
    /// Dropped when it follows the section.
    pub tail: &'static str,
}

const SHAPE: Shape = Shape {
    open: &[],
    bare: false,
    begin: &[],
    call: &[],
    several: true,
    separators: &[],
    close: &[],
    tail: "",
};

/// How a call is begun in the prompt, so that the model has to make one.
#[derive(Clone, Copy, Debug)]
pub struct Force {
    /// Up to the name.
    pub before_name: &'static str,
    /// From the name to the arguments.
    pub after_name: &'static str,
    /// From the arguments of the last call to the end of the section. `None`: the arguments are no JSON, and no schema can hold them.
    pub close: Option<&'static str>,
    /// From the arguments of one call to the name of the next; empty: the next begins a section of its own.
    pub next: &'static str,
}

const FORCE: Force = Force { before_name: "", after_name: "", close: None, next: "" };

/// What the ids of calls look like where the model writes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// `call_` and 24 letters and digits.
    OpenAi,
    /// Nine letters and digits; Mistral's templates refuse others.
    Nine,
    /// `functions.NAME:INDEX`, as Kimi's template expects.
    Kimi,
}

/// A row of the table.
#[derive(Debug)]
pub struct ToolFormat {
    pub name: &'static str,
    /// Other names it goes by.
    pub aliases: &'static [&'static str],
    /// For help texts.
    pub about: &'static str,
    /// Tried in this order where several open with the same marker.
    pub shapes: &'static [Shape],
    pub force: Force,
    pub ids: Ids,
    /// gpt-oss: text comes in messages with headers, and this format is both the calls' and the reasoning's.
    pub harmony: bool,
    /// A call ends reasoning that was not closed: the marker is a token of its own and not written in prose.
    pub ends_reasoning: bool,
    /// Any of these sets, all contained in a chat template, means this format.
    pub signs: &'static [&'static [&'static str]],
}

const FORMAT: ToolFormat = ToolFormat {
    name: "",
    aliases: &[],
    about: "",
    shapes: &[],
    force: FORCE,
    ids: Ids::OpenAi,
    harmony: false,
    ends_reasoning: false,
    signs: &[],
};

const QWEN_MARKUP: Markup = Markup {
    open: "<parameter=",
    value: &[(">", ArgumentForm::BySchema)],
    close: "</parameter>",
    end: "</function>",
    newlines: true,
};
const GLM_MARKUP: Markup = Markup {
    open: "<arg_key>",
    value: &[
        ("</arg_key>\n<arg_value>", ArgumentForm::BySchema),
        ("</arg_key><arg_value>", ArgumentForm::BySchema),
    ],
    close: "</arg_value>",
    end: "</tool_call>",
    newlines: false,
};
const MINIMAX_MARKUP: Markup = Markup {
    open: "<parameter name=\"",
    value: &[("\">", ArgumentForm::BySchema)],
    close: "</parameter>",
    end: "</invoke>",
    newlines: false,
};
const DSML_MARKUP: Markup = Markup {
    open: "<｜DSML｜parameter name=\"",
    value: &[("\" string=\"true\">", ArgumentForm::Text), ("\" string=\"false\">", ArgumentForm::Json)],
    close: "</｜DSML｜parameter>",
    end: "</｜DSML｜invoke>",
    newlines: false,
};
const GEMMA: LiteralDialect = LiteralDialect::Marked { quotes: &["<|\"|>", "<escape>", "\""] };

/// A list of envelopes in JSON's brackets.
const fn json_list(open: &'static [&'static str], close: &'static [&'static str]) -> Shape {
    Shape { open, begin: &[Piece::Lit("[")], call: &[Piece::Envelope], separators: &[","], close, ..SHAPE }
}

const MISTRAL: &[Shape] = &[
    json_list(&["[TOOL_CALLS]"], &["]"]),
    Shape {
        open: &["[TOOL_CALLS]"],
        call: &[Piece::Name, Piece::Lit("[ARGS]"), Piece::Json],
        several: false,
        ..SHAPE
    },
    Shape {
        open: &["[TOOL_CALLS]"],
        call: &[Piece::Name, Piece::Lit("[CALL_ID]"), Piece::Id, Piece::Lit("[ARGS]"), Piece::Json],
        several: false,
        ..SHAPE
    },
    Shape { open: &["[TOOL_CALLS]"], call: &[Piece::Name, Piece::Json], several: false, ..SHAPE },
];

const DEEPSEEK_V3: Shape = Shape {
    open: &["<｜tool▁calls▁begin｜>"],
    call: &[
        Piece::Lit("<｜tool▁call▁begin｜>"),
        Piece::Lit("function"),
        Piece::Lit("<｜tool▁sep｜>"),
        Piece::Name,
        Piece::Lit("```json"),
        Piece::Json,
        Piece::Lit("```"),
        Piece::Lit("<｜tool▁call▁end｜>"),
    ],
    close: &["<｜tool▁calls▁end｜>"],
    ..SHAPE
};
const DEEPSEEK_V31: Shape = Shape {
    open: &["<｜tool▁calls▁begin｜>"],
    call: &[
        Piece::Lit("<｜tool▁call▁begin｜>"),
        Piece::Name,
        Piece::Lit("<｜tool▁sep｜>"),
        Piece::Json,
        Piece::Lit("<｜tool▁call▁end｜>"),
    ],
    close: &["<｜tool▁calls▁end｜>"],
    ..SHAPE
};

const PYTHON: &[Piece] = &[Piece::Literal(LiteralDialect::Python)];

/// All formats. For a template that fits several, the first counts.
pub static TOOL_FORMATS: &[ToolFormat] = &[
    ToolFormat {
        name: "harmony",
        aliases: &["openai", "gpt_oss", "gpt-oss"],
        about: "gpt-oss: <|channel|>commentary to=functions.NAME<|message|>{...}",
        force: Force {
            before_name: "<|channel|>commentary to=functions.",
            after_name: " <|constrain|>json<|message|>",
            close: Some(""),
            ..FORCE
        },
        harmony: true,
        signs: &[&["<|channel|>", "<|message|>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "deepseek_v32",
        aliases: &["deepseek_v4"],
        about: "DeepSeek V3.2 and later: <｜DSML｜invoke name=...>",
        shapes: &[Shape {
            open: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
            call: &[
                Piece::Lit("<｜DSML｜invoke name=\""),
                Piece::Name,
                Piece::Lit("\">"),
                Piece::Markup(&DSML_MARKUP),
            ],
            close: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
            ..SHAPE
        }],
        force: Force {
            before_name: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
            after_name: "\">\n",
            ..FORCE
        },
        ends_reasoning: true,
        signs: &[&["｜DSML｜"]],
        ..FORMAT
    },
    ToolFormat {
        name: "deepseek_v3",
        aliases: &["deepseek_r1"],
        about: "DeepSeek V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a JSON code block",
        shapes: &[DEEPSEEK_V3, DEEPSEEK_V31],
        force: Force {
            before_name: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name: "\n```json\n",
            close: Some("\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
            next: "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        },
        ends_reasoning: true,
        signs: &[&["<｜tool▁call▁begin｜>", "```json"]],
        ..FORMAT
    },
    ToolFormat {
        name: "deepseek_v31",
        about: "DeepSeek V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}",
        shapes: &[DEEPSEEK_V31, DEEPSEEK_V3],
        force: Force {
            before_name: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            after_name: "<｜tool▁sep｜>",
            close: Some("<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
            next: "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        },
        ends_reasoning: true,
        signs: &[&["<｜tool▁call▁begin｜>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "kimi_k2",
        about: "Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}",
        shapes: &[Shape {
            open: &["<|tool_calls_section_begin|>"],
            call: &[
                Piece::Lit("<|tool_call_begin|>"),
                Piece::NumberedName,
                Piece::Lit("<|tool_call_argument_begin|>"),
                Piece::Json,
                Piece::Lit("<|tool_call_end|>"),
            ],
            close: &["<|tool_calls_section_end|>"],
            ..SHAPE
        }],
        force: Force {
            before_name: "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            after_name: ":0<|tool_call_argument_begin|>",
            close: Some("<|tool_call_end|><|tool_calls_section_end|>"),
            next: "<|tool_call_end|><|tool_call_begin|>functions.",
        },
        ids: Ids::Kimi,
        ends_reasoning: true,
        signs: &[&["<|tool_call_begin|>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "minimax_m2",
        about: "MiniMax M2: <minimax:tool_call><invoke name=...>",
        shapes: &[Shape {
            open: &["<minimax:tool_call>"],
            call: &[
                Piece::Lit("<invoke name=\""),
                Piece::Name,
                Piece::Lit("\">"),
                Piece::Markup(&MINIMAX_MARKUP),
            ],
            close: &["</minimax:tool_call>"],
            ..SHAPE
        }],
        force: Force { before_name: "<minimax:tool_call>\n<invoke name=\"", after_name: "\">\n", ..FORCE },
        signs: &[&["<minimax:tool_call>"], &["minimax:tool_call", "<invoke name="]],
        ..FORMAT
    },
    ToolFormat {
        name: "glm45",
        aliases: &["glm47", "glm"],
        about: "GLM 4.5 and later: <tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value>",
        shapes: &[Shape {
            open: &["<tool_call>"],
            call: &[Piece::Name, Piece::Markup(&GLM_MARKUP)],
            several: false,
            ..SHAPE
        }],
        force: Force { before_name: "<tool_call>", after_name: "\n", ..FORCE },
        signs: &[&["<arg_key>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "qwen3_coder",
        aliases: &["qwen3_xml"],
        about: "Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>...",
        shapes: &[
            Shape {
                open: &["<tool_call>"],
                call: &[Piece::Lit("<function="), Piece::Name, Piece::Lit(">"), Piece::Markup(&QWEN_MARKUP)],
                close: &["</tool_call>"],
                ..SHAPE
            },
            // The outer tag is often forgotten.
            Shape {
                open: &["<function="],
                call: &[Piece::Name, Piece::Lit(">"), Piece::Markup(&QWEN_MARKUP)],
                several: false,
                tail: "</tool_call>",
                ..SHAPE
            },
        ],
        force: Force { before_name: "<tool_call>\n<function=", after_name: ">\n", ..FORCE },
        signs: &[&["<function=", "<parameter="]],
        ..FORMAT
    },
    ToolFormat {
        name: "hermes",
        aliases: &["qwen", "qwen25", "qwen3"],
        about: "Hermes, Qwen2.5, Qwen3: <tool_call>{\"name\": ..., \"arguments\": {...}}</tool_call>",
        shapes: &[Shape {
            open: &["<tool_call>"],
            call: &[Piece::Envelope],
            separators: &[","],
            close: &["</tool_call>"],
            ..SHAPE
        }],
        force: Force {
            before_name: "<tool_call>\n{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}\n</tool_call>"),
            ..FORCE
        },
        signs: &[&["<tool_call>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "mistral_v11",
        about: "Mistral Small 3.2, Magistral, Devstral: [TOOL_CALLS]NAME[ARGS]{...}",
        shapes: MISTRAL,
        force: Force {
            before_name: "[TOOL_CALLS]",
            after_name: "[ARGS]",
            close: Some(""),
            next: "[TOOL_CALLS]",
        },
        ids: Ids::Nine,
        ends_reasoning: true,
        signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
        ..FORMAT
    },
    ToolFormat {
        name: "mistral",
        about: "Mistral before that: [TOOL_CALLS][{\"name\": ..., \"arguments\": {...}}]",
        shapes: MISTRAL,
        force: Force {
            before_name: "[TOOL_CALLS][{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}]"),
            next: "}, {\"name\": \"",
        },
        ids: Ids::Nine,
        ends_reasoning: true,
        signs: &[&["[TOOL_CALLS]"]],
        ..FORMAT
    },
    ToolFormat {
        name: "gemma4",
        about: "Gemma 4: <|tool_call>call:NAME{key:<|\"|>text<|\"|>}<tool_call|>",
        shapes: &[Shape {
            open: &["<|tool_call>"],
            call: &[Piece::Lit("call:"), Piece::Literal(GEMMA)],
            close: &["<tool_call|>"],
            ..SHAPE
        }],
        force: Force { before_name: "<|tool_call>call:", after_name: "{", ..FORCE },
        ends_reasoning: true,
        signs: &[&["<|tool_call>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "functiongemma",
        about: "FunctionGemma: <start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>",
        shapes: &[Shape {
            open: &["<start_function_call>"],
            call: &[Piece::Lit("call:"), Piece::Literal(GEMMA)],
            close: &["<end_function_call>"],
            ..SHAPE
        }],
        force: Force { before_name: "<start_function_call>call:", after_name: "{", ..FORCE },
        signs: &[&["<start_function_call>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "gemma3",
        aliases: &["gemma"],
        about: "Gemma 3: Python calls in a tool_code block, or in brackets",
        shapes: &[
            Shape { open: &["```tool_code"], call: PYTHON, separators: &[","], close: &["```"], ..SHAPE },
            Shape {
                open: &["["],
                bare: true,
                begin: &[Piece::Lit("[")],
                call: PYTHON,
                separators: &[","],
                close: &["]"],
                ..SHAPE
            },
        ],
        force: Force { before_name: "```tool_code\n", after_name: "(", ..FORCE },
        signs: &[&["tool_code"]],
        ..FORMAT
    },
    ToolFormat {
        name: "phi4_mini_json",
        aliases: &["phi4", "phi"],
        about: "Phi-4-mini: functools[{\"name\": ..., \"arguments\": {...}}]",
        shapes: &[
            json_list(&["functools"], &["]"]),
            Shape { tail: "<|/tool_call|>", ..json_list(&["<|tool_call|>"], &["]"]) },
        ],
        force: Force {
            before_name: "functools[{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}]"),
            next: "}, {\"name\": \"",
        },
        signs: &[&["functools"], &["<|tool|>", "<|/tool|>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "nemotron_json",
        about: "Nemotron: <TOOLCALL>[{\"name\": ..., \"arguments\": {...}}]</TOOLCALL>",
        shapes: &[Shape { tail: "</TOOLCALL>", ..json_list(&["<TOOLCALL>"], &["]"]) }],
        force: Force {
            before_name: "<TOOLCALL>[{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}]</TOOLCALL>"),
            next: "}, {\"name\": \"",
        },
        signs: &[&["<TOOLCALL>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "granite",
        about: "Granite 3: <|tool_call|>[{\"name\": ..., \"arguments\": {...}}]",
        shapes: &[json_list(&["<|tool_call|>", "<tool_call>"], &["]"])],
        force: Force {
            before_name: "<|tool_call|>[{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}]"),
            next: "}, {\"name\": \"",
        },
        signs: &[&["<|tool_call|>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "jamba",
        about: "Jamba: <tool_calls>[{\"name\": ..., \"arguments\": {...}}]</tool_calls>",
        shapes: &[Shape { tail: "</tool_calls>", ..json_list(&["<tool_calls>"], &["]"]) }],
        force: Force {
            before_name: "<tool_calls>[{\"name\": \"",
            after_name: "\", \"arguments\":",
            close: Some("}]</tool_calls>"),
            next: "}, {\"name\": \"",
        },
        signs: &[&["<tool_calls>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "olmo3",
        about: "OLMo 3: <function_calls>NAME(key='text')</function_calls>",
        shapes: &[Shape {
            open: &["<function_calls>"],
            call: PYTHON,
            separators: &[","],
            close: &["</function_calls>"],
            ..SHAPE
        }],
        force: Force { before_name: "<function_calls>", after_name: "(", ..FORCE },
        signs: &[&["<function_calls>"]],
        ..FORMAT
    },
    ToolFormat {
        name: "pythonic",
        aliases: &["llama4_pythonic"],
        about: "Llama 4, Llama 3.2: [NAME(key='text'), ...]",
        shapes: &[
            Shape {
                open: &["<|python_start|>"],
                begin: &[Piece::Lit("[")],
                call: PYTHON,
                separators: &[","],
                close: &["]"],
                tail: "<|python_end|>",
                ..SHAPE
            },
            Shape {
                open: &["["],
                bare: true,
                begin: &[Piece::Lit("[")],
                call: PYTHON,
                separators: &[","],
                close: &["]"],
                tail: "<|python_end|>",
                ..SHAPE
            },
        ],
        force: Force { before_name: "[", after_name: "(", ..FORCE },
        signs: &[&["<|python_start|>"], &["func_name1(params_name1"]],
        ..FORMAT
    },
    ToolFormat {
        name: "llama3_json",
        aliases: &["llama", "llama3", "llama4_json"],
        about: "Llama 3.1 to 3.3: {\"name\": ..., \"parameters\": {...}}",
        shapes: &[
            Shape { open: &["<|python_tag|>"], call: &[Piece::Envelope], separators: &[";", ","], ..SHAPE },
            Shape { open: &["{"], bare: true, call: &[Piece::Envelope], separators: &[";", ","], ..SHAPE },
        ],
        force: Force {
            before_name: "{\"name\": \"",
            after_name: "\", \"parameters\":",
            close: Some("}"),
            ..FORCE
        },
        signs: &[&["<|python_tag|>"], &["{\"name\": function name, \"parameters\""]],
        ..FORMAT
    },
];

impl ToolFormat {
    /// By name or alias.
    pub fn named(name: &str) -> Option<&'static Self> {
        TOOL_FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format that a chat template tells its model to use.
    pub fn of_template(source: &str) -> Option<&'static Self> {
        let fits = |signs: &&[&str]| signs.iter().all(|sign| source.contains(sign));
        TOOL_FORMATS.iter().find(|format| format.signs.iter().any(fits))
    }

    /// Text that begins a call, of this function or of one the model chooses.
    pub fn opening(&self, function: Option<&str>) -> String {
        match function {
            Some(name) => format!("{}{name}{}", self.force.before_name, self.force.after_name),
            None => self.force.before_name.to_owned(),
        }
    }

    /// Every text this format looks for.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let harmony = if self.harmony { super::harmony::MARKERS } else { &[] };
        let shapes = self.shapes.iter().flat_map(|shape| {
            let pieces = shape.begin.iter().chain(shape.call).flat_map(Piece::markers);
            let around = shape.open.iter().chain(shape.separators).chain(shape.close).copied();
            pieces.chain(around).chain([shape.tail])
        });
        harmony.iter().copied().chain(shapes).filter(|marker| !marker.is_empty())
    }
}

impl Piece {
    fn markers(&self) -> Vec<&'static str> {
        match self {
            Self::Lit(text) => vec![text],
            Self::Markup(markup) => {
                let values = markup.value.iter().map(|(text, _)| *text);
                values.chain([markup.open, markup.close, markup.end]).collect()
            }
            Self::Literal(LiteralDialect::Marked { quotes }) => quotes.to_vec(),
            _ => Vec::new(),
        }
    }
}
