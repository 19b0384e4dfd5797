//! How much a model is to think: from what requests say to what the model's chat template and reasoning format can do.
//!
//! Owns: the words of all APIs, and which of three means they turn: the template's own word (`reasoning_effort`), its switch
//! (`enable_thinking`), and a budget of tokens after which the end of the reasoning is written for the model. Must never: refuse a known
//! word because a model has none of the three; then it is a hint (`hints`). Invariants: what a request says itself in
//! `chat_template_kwargs` wins; a budget of its own wins over one that a word stands for.

use folio_text::{ChatTemplate, TemplateTools};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// What OpenAI's API and templates call it.
pub const EFFORT: &str = "reasoning_effort";
/// From none to all.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
/// Of templates that write whatever word they are given.
const USUAL: [&str; 3] = ["low", "medium", "high"];
/// Tokens of reasoning that a word stands for where a template has no words; of higher ones no limit.
const BUDGETS: [(&str, u32); 4] = [("none", 0), ("minimal", 512), ("low", 2048), ("medium", 8192)];

/// What a template can be told about effort.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Efforts {
    /// The words of its `reasoning_effort`, from the least; none: it has no place for one.
    words: Vec<&'static str>,
    switch: Option<&'static str>,
    /// The model marks its reasoning.
    reasons: bool,
}

impl Efforts {
    pub fn of(template: Option<&ChatTemplate>, known: Option<&TemplateTools>, reasons: bool) -> Self {
        let words = match template.filter(|template| template.mentions(EFFORT)) {
            None => Vec::new(),
            Some(template) => {
                let quoted = |word: &&str| {
                    template.mentions(&format!("'{word}'")) || template.mentions(&format!("\"{word}\""))
                };
                EFFORTS.into_iter().filter(|word| USUAL.contains(word) || quoted(word)).collect()
            }
        };
        Self { words, switch: known.and_then(|template| template.thinking_switch), reasons }
    }

    /// Turns what there is to turn in `kwargs`. `param` is the field of the word. Returns the budget to hold the reasoning to.
    pub fn apply(
        &self,
        param: &'static str,
        effort: Option<&str>,
        thinking: Thinking,
        kwargs: &mut Map<String, Value>,
    ) -> Result<Option<(u32, &'static str)>, ApiError> {
        if let Some(effort) = effort.filter(|effort| !EFFORTS.contains(effort)) {
            let known = EFFORTS.join(", ");
            let message = format!("Invalid value for '{param}': '{effort}' is not one of {known}.");
            return Err(ApiError::invalid(param, message));
        }
        let on = thinking.on.or(effort.map(|effort| effort != "none"));
        let asked = match on {
            Some(false) => Some("none"),
            _ => effort,
        };
        if let Some(word) = asked.and_then(|effort| self.nearest(effort)) {
            kwargs.entry(EFFORT).or_insert(word.into());
        }
        if let (Some(on), Some(name)) = (on, self.switch) {
            kwargs.entry(name).or_insert(on.into());
        }
        if !self.reasons {
            return Ok(None);
        }
        let switched_off = on == Some(false) && self.switch.is_some();
        let worded = asked.is_some_and(|effort| self.words.contains(&effort));
        let meant = asked.filter(|_| !switched_off && !worded);
        let meant = BUDGETS.iter().find(|(word, _)| Some(*word) == meant).map(|(_, tokens)| (*tokens, param));
        Ok(thinking.budget.or(meant))
    }

    /// The template's word that is nearest to `effort`, never below the least.
    fn nearest(&self, effort: &str) -> Option<&'static str> {
        let place = |word: &str| EFFORTS.iter().position(|other| *other == word).unwrap_or(0);
        self.words.iter().copied().min_by_key(|word| place(word).abs_diff(place(effort)))
    }
}

/// How much to think, said by a word and by more than a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// On or off, where the request says so.
    pub on: Option<bool>,
    /// Tokens, and the field that says so.
    pub budget: Option<(u32, &'static str)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use folio_text::{SpecialTokens, TemplateSources};

    fn efforts(template: &str) -> Efforts {
        let mut sources = TemplateSources::default();
        sources.add("default", template, "test");
        let template = ChatTemplate::compile(sources, &SpecialTokens::default()).unwrap();
        let known = template.as_ref().map(ChatTemplate::tools);
        Efforts::of(template.as_ref(), known.as_ref(), true)
    }

    fn told(template: &str, effort: &str, thinking: Thinking) -> (Value, Option<u32>) {
        let mut kwargs = Map::new();
        let budget = efforts(template).apply(EFFORT, Some(effort), thinking, &mut kwargs).unwrap();
        (kwargs.into(), budget.map(|(tokens, _)| tokens))
    }

    const WORDS: &str = "{{ reasoning_effort }}";
    const MORE_WORDS: &str = "{% if reasoning_effort == 'none' %}-{% endif %}{{ reasoning_effort }}";
    const SWITCH: &str =
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}";
    const NOTHING: &str = "{{ messages[0].content }}";

    #[test]
    fn a_word_turns_what_there_is() {
        use serde_json::json;
        let word = |word: &str| json!({"reasoning_effort": word});
        for (template, effort, kwargs, budget) in [
            (WORDS, "low", word("low"), None),
            (WORDS, "minimal", word("low"), Some(512)),
            (WORDS, "max", word("high"), None),
            (WORDS, "none", word("low"), Some(0)),
            (MORE_WORDS, "none", word("none"), None),
            (SWITCH, "none", json!({"enable_thinking": false}), None),
            (SWITCH, "low", json!({"enable_thinking": true}), Some(2048)),
            (SWITCH, "high", json!({"enable_thinking": true}), None),
            (NOTHING, "none", json!({}), Some(0)),
            (NOTHING, "medium", json!({}), Some(8192)),
        ] {
            assert_eq!(told(template, effort, Thinking::default()), (kwargs, budget), "{template} {effort}");
        }
    }

    #[test]
    fn what_is_said_more_exactly_wins() {
        use serde_json::json;
        let off = Thinking { on: Some(false), budget: None };
        assert_eq!(told(SWITCH, "high", off), (json!({"enable_thinking": false}), None));
        assert_eq!(told(NOTHING, "high", off).1, Some(0));
        let budget = Thinking { on: Some(true), budget: Some((4000, "b")) };
        assert_eq!(told(SWITCH, "low", budget).1, Some(4000));
        let mut kwargs = Map::from_iter([("enable_thinking".to_owned(), true.into())]);
        efforts(SWITCH).apply(EFFORT, Some("none"), Thinking::default(), &mut kwargs).unwrap();
        assert_eq!(kwargs["enable_thinking"], true);
        let error = efforts(WORDS).apply(EFFORT, Some("much"), Thinking::default(), &mut kwargs).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(EFFORT));
    }
}
