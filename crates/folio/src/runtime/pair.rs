//! Whether what drafts fits the model: how often both say the same where the model answers.
//!
//! Owns: what the model is asked, how long that may take, and what is said of the outcome. Must never: keep anything from being served.

use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::{Drafter, DrafterModel, Executor};
use folio_text::{ChatTemplate, Tokenizer};
use serde_json::json;

use super::agreement::{Agreement, AgreementLimits, Questions, agreement};
use super::chat_prompt;

/// Of conversations, to which every model has something to say that those who made a drafter for it heard often.
const QUESTIONS: [&str; 2] = ["Hello! Who are you?", "What can you do?"];
/// Of a model that has no conversations.
const BEGINNINGS: [&str; 2] = ["Once upon a time", "The most important thing is"];
/// Longest prompt, bytes: a template may say much before a question.
const PROMPT_BYTES_MAX: usize = 64 << 10;
const ANSWER_TOKENS: u32 = 32;
/// Answers are cut when they take longer, from the first token on.
const PATIENCE: Duration = Duration::from_secs(5);
/// Fewer places say nothing.
const PLACES_MIN: u32 = 16;
/// A drafter that says less often what the model says is none that was made for it.
const SHARE_MIN: f64 = 0.4;
/// Layers with which it would say the same so much more often are the right ones.
const SHARE_MORE: f64 = 0.05;

/// How often a model and what drafts for it say the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    pub name: String,
    pub drafter: Drafter,
    pub found: Agreement,
    /// Of a head: the same where it reads the layers so many places behind, as far as that was tried.
    pub behind: Vec<(isize, Agreement)>,
    /// What is probably wrong, where that is hardly ever, or would be more often with other layers.
    pub doubt: Option<String>,
}

impl Pair {
    pub(super) fn new(name: String, drafter: Drafter, found: Agreement) -> Self {
        let doubt = doubt(&name, drafter, found);
        Self { name, drafter, found, behind: Vec::new(), doubt }
    }

    /// Both say the same so often where the head reads the layers so many places behind.
    pub fn compare(&mut self, places: isize, found: Agreement) {
        if found.share() > self.found.share() + SHARE_MORE {
            let better = format!(
                "{} would say the same at {} of {} places with the layers {}: its eagle_aux_hidden_state_layer_ids are probably counted \
                 otherwise (their inputs in vLLM's form, their outputs in the others)",
                self.name,
                found.same,
                found.places,
                direction(places),
            );
            self.doubt = Some(match self.doubt.take() {
                Some(doubt) => format!("{doubt}. {better}"),
                None => better,
            });
        }
        self.behind.push((places, found));
    }

    /// "with the layers one before 21 of 66, with the layers one behind 50 of 66"; nothing where none were tried.
    pub fn neighbours(&self) -> String {
        let of = |(places, found): &(isize, Agreement)| {
            format!("with the layers {} {} of {}", direction(*places), found.same, found.places)
        };
        self.behind.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    /// "says what the model says at 70 of 73 places of its answers"
    pub fn sentence(&self) -> String {
        said(self.found)
    }
}

fn direction(places: isize) -> &'static str {
    if places < 0 { "one before" } else { "one behind" }
}

fn said(found: Agreement) -> String {
    format!("says what the model says at {} of {} places of the model's answers", found.same, found.places)
}

/// What a model is asked, whose answers end before one of these tokens.
pub(super) fn questions(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    ends: &[u32],
) -> Result<Questions> {
    let asked = |template: &ChatTemplate| -> Result<Vec<Vec<u32>>> {
        let message = |text: &&str| json!({"role": "user", "content": text});
        let prompt = |text| chat_prompt(template, tokenizer, &[message(text)], 0, PROMPT_BYTES_MAX);
        QUESTIONS.iter().map(prompt).collect()
    };
    // A template that takes no plain question is not this one's business.
    let prompts = match template.map(asked) {
        Some(Ok(prompts)) => prompts,
        Some(Err(_)) | None => {
            let begin = |text: &&str| Ok(tokenizer.encode(text, true, PROMPT_BYTES_MAX)?);
            BEGINNINGS.iter().map(begin).collect::<Result<_>>()?
        }
    };
    Ok(Questions { prompts, answer_tokens: ANSWER_TOKENS, ends: ends.to_vec() })
}

/// How often both say the same. `None`: one of them failed.
pub(super) fn find_out(
    model: &mut dyn Executor,
    drafter: &mut dyn Executor,
    as_drafter: DrafterModel,
    room: AgreementLimits<'_>,
    questions: &Questions,
) -> Option<Agreement> {
    let mut until = None;
    let mut goes_on = || {
        let now = Instant::now();
        now < *until.get_or_insert(now + PATIENCE)
    };
    let found = agreement(model, drafter, as_drafter, room, questions, &mut goes_on);
    found.inspect_err(|error| tracing::warn!(%error, "whether drafts are right was not found out")).ok()
}

/// What is probably wrong with a drafter that hardly ever says what the model says.
fn doubt(name: &str, drafter: Drafter, found: Agreement) -> Option<String> {
    if found.places < PLACES_MIN || found.share() >= SHARE_MIN {
        return None;
    }
    let cause = match drafter {
        Drafter::Eagle3 => {
            "it probably reads other layers than those it was trained on (eagle_aux_hidden_state_layer_ids: their inputs in vLLM's form, \
             their outputs in the others), has a norm too many or too few (norm_before_residual, fc_norm, norm_output), or reads the \
             hidden states of another model"
        }
        Drafter::Mtp => {
            "it probably reads a hidden state before the norm that it was trained on behind it or the other way round, or its weights are \
             those of another model"
        }
        Drafter::Suffix | Drafter::Ngram | Drafter::Model => {
            "it is probably too small, or was made for another model"
        }
    };
    Some(format!(
        "{name} {} ({:.0} %), fewer than the {:.0} % of a drafter that fits: {cause}. The tokens are the same, and come no sooner",
        said(found),
        100.0 * found.share(),
        100.0 * SHARE_MIN
    ))
}
