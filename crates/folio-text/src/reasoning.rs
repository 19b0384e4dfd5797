//! How models mark what they think before they answer, as a table, and where a prompt leaves them.
//!
//! Owns: the markers. Must never: separate text itself; that is the machine's work (`tools::machine`).

/// A row of the table.
#[derive(Debug)]
pub struct ReasoningFormat {
    pub name: &'static str,
    /// Other names it goes by.
    pub aliases: &'static [&'static str],
    /// For help texts.
    pub about: &'static str,
    pub open: &'static str,
    pub close: &'static str,
    /// The answer begins as reasoning although nothing opened it (some models were trained to leave the mark out).
    pub assumed: bool,
    /// The marks are tokens of their own and not written in prose: they count anywhere, not only where an answer begins.
    pub anywhere: bool,
    /// gpt-oss: the analysis channel; see [`ToolFormat::harmony`](crate::ToolFormat).
    pub harmony: bool,
    /// Any of these in a chat template means this format.
    pub signs: &'static [&'static str],
}

const THINK: ReasoningFormat = ReasoningFormat {
    name: "think",
    aliases: &["qwen3", "glm45", "minimax_m2", "nemotron", "smollm3", "deepseek_v31", "kimi_k2"],
    about: "<think>...</think>, also where the template opens it (Qwen3, GLM, DeepSeek V3.1, Nemotron, MiniMax)",
    open: "<think>",
    close: "</think>",
    assumed: false,
    anywhere: false,
    harmony: false,
    signs: &["<think>", "</think>"],
};

/// All formats. For a template that fits several, the first counts.
pub static REASONING_FORMATS: &[ReasoningFormat] = &[
    ReasoningFormat {
        name: "harmony",
        aliases: &["openai", "gpt_oss", "gpt-oss", "openai_gptoss"],
        about: "gpt-oss: the analysis channel",
        open: "",
        close: "",
        harmony: true,
        signs: &["<|channel|>"],
        ..THINK
    },
    ReasoningFormat {
        name: "gemma4",
        aliases: &[],
        about: "Gemma 4: <|channel>thought ... <channel|>",
        open: "<|channel>thought\n",
        close: "<channel|>",
        anywhere: true,
        signs: &["<|channel>"],
        ..THINK
    },
    ReasoningFormat {
        name: "mistral",
        aliases: &["magistral"],
        about: "Magistral: [THINK]...[/THINK]",
        open: "[THINK]",
        close: "[/THINK]",
        anywhere: true,
        signs: &["[THINK]"],
        ..THINK
    },
    ReasoningFormat {
        name: "seed_oss",
        aliases: &[],
        about: "Seed-OSS: <seed:think>...</seed:think>",
        open: "<seed:think>",
        close: "</seed:think>",
        signs: &["<seed:think>"],
        ..THINK
    },
    ReasoningFormat {
        name: "command_r",
        aliases: &["cohere"],
        about: "Command A: <|START_THINKING|>...<|END_THINKING|>",
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
        anywhere: true,
        signs: &["<|START_THINKING|>"],
        ..THINK
    },
    ReasoningFormat {
        name: "granite",
        aliases: &[],
        about: "Granite 3.2: Here is my thought process: ... Here is my response:",
        open: "Here is my thought process:",
        close: "Here is my response:",
        signs: &["Here is my thought process:"],
        ..THINK
    },
    THINK,
    ReasoningFormat {
        name: "deepseek_r1",
        aliases: &["qwq", "step3"],
        about: "the same, and an answer begins inside unless the prompt closed it (DeepSeek R1, QwQ)",
        assumed: true,
        ..THINK
    },
];

impl ReasoningFormat {
    /// By name or alias.
    pub fn named(name: &str) -> Option<&'static Self> {
        REASONING_FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format that a chat template knows of.
    pub fn of_template(source: &str) -> Option<&'static Self> {
        REASONING_FORMATS.iter().find(|format| format.signs.iter().any(|sign| source.contains(sign)))
    }

    /// Whether an answer to this prompt begins inside reasoning: the prompt ends by opening it, or, where `continued` is
    /// the beginning of the answer itself, that left it open.
    pub fn begins_inside(&self, prompt: &str, continued: Option<&str>) -> bool {
        if self.harmony {
            return false;
        }
        let prompt = prompt.trim_end();
        if let Some(text) = continued {
            return match (text.rfind(self.open), text.rfind(self.close)) {
                (Some(open), Some(close)) => open > close,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => {
                    let before = prompt.strip_suffix(text.trim_end()).unwrap_or(prompt).trim_end();
                    before.ends_with(self.open.trim_end())
                }
            };
        }
        prompt.ends_with(self.open.trim_end()) || (self.assumed && !prompt.ends_with(self.close))
    }

    /// Every text this format looks for.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let harmony = if self.harmony { crate::tools::HARMONY_MARKERS } else { &[] };
        harmony.iter().copied().chain([self.open, self.close]).filter(|marker| !marker.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for (index, format) in REASONING_FORMATS.iter().enumerate() {
            for name in format.aliases.iter().chain([&format.name]) {
                assert!(std::ptr::eq(ReasoningFormat::named(name).expect("found"), format), "{name}");
                assert!(
                    !REASONING_FORMATS[..index].iter().any(|other| other.aliases.contains(name)),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn prompts_tell_where_the_answer_begins() {
        let think = ReasoningFormat::named("think").expect("think");
        let assumed = ReasoningFormat::named("deepseek_r1").expect("deepseek_r1");
        for (prompt, plain, r1) in [
            ("<|im_start|>assistant\n", false, true),
            ("<|im_start|>assistant\n<think>\n", true, true),
            ("assistant\n<think>\n\n</think>\n\n", false, false),
            ("<think> is a tag<|im_end|>\nassistant\n", false, true),
        ] {
            assert_eq!(think.begins_inside(prompt, None), plain, "{prompt:?}");
            assert_eq!(assumed.begins_inside(prompt, None), r1, "{prompt:?}");
        }
        assert!(think.begins_inside("a\n<think>so", Some("<think>so")));
        assert!(!think.begins_inside("a\n<think>so</think>we", Some("<think>so</think>we")));
        assert!(think.begins_inside("a\n<think>\nso", Some("so")));
        assert!(!think.begins_inside("a\nso", Some("so")));
    }

    #[test]
    fn templates_tell_the_format() {
        let name = |source| ReasoningFormat::of_template(source).map(|format| format.name);
        assert_eq!(name("{{ '<|channel|>analysis' }}"), Some("harmony"));
        assert_eq!(name("content.split('</think>')[-1]"), Some("think"));
        assert_eq!(name("plain"), None);
    }
}
