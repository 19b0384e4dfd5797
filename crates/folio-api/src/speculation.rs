//! What a request says of speculative decoding: `prediction`, `speculative.n_max`, `speculative.type`. The same in every API but Ollama's.
//!
//! None changes a token of the answer, only the time that it takes.

use crate::error::ApiError;
use crate::fields::{Fields, Json, list, parse, within};

/// Most drafts that a request may ask for in one step.
pub const DRAFTS_MAX: u32 = 16;
/// What `speculative.type` calls no drafter: the flag's word, and llama-server's.
pub const OFF: [&str; 2] = ["off", "none"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// llama-server's `speculative.n_max`: most drafts in one step; 0: none. `None`: as the server has it.
    pub most: Option<u32>,
    /// llama-server's `speculative.type`: the name of what proposes drafts. Whoever serves knows what there is.
    pub drafter: Option<String>,
    /// OpenAI's `prediction`: what much of the answer will be.
    pub prediction: Option<String>,
}

impl SpeculationOptions {
    /// Whether the request itself wants drafts: only then does its usage tell what became of them.
    pub fn wants_drafts(&self) -> bool {
        self.most != Some(0) && (self.most.is_some() || self.drafter.is_some() || self.prediction.is_some())
    }

    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let most = fields.take("speculative.n_max")?;
        let most = within(fields, "speculative.n_max", most, (0, DRAFTS_MAX))?;
        let drafter = fields.take::<String>("speculative.type")?;
        // No drafter is no drafts.
        let (off, drafter) = match drafter {
            Some(name) if OFF.contains(&&*name) => (Some(0), None),
            drafter => (None, drafter),
        };
        let path = fields.path("prediction");
        let prediction = fields.raw("prediction").map(|raw| prediction(raw, path)).transpose()?;
        Ok(Self { most: off.or(most), drafter, prediction })
    }
}

fn prediction(raw: Json, path: String) -> Result<String, ApiError> {
    let mut fields = Fields::of_value(raw, path)?;
    content(&mut fields, "content")?;
    let path = fields.path("content");
    let text = match fields.require_raw("content")? {
        raw if raw.is_list() => {
            let mut text = String::new();
            for (at, part) in list(raw, &path)?.into_iter().enumerate() {
                let mut part = Fields::of_value(part, format!("{path}[{at}]"))?;
                content(&mut part, "text")?;
                text += &part.require::<String>("text")?;
                part.finish(&[])?;
            }
            text
        }
        raw => parse::<String>(raw, &path)?,
    };
    fields.finish(&[])?;
    Ok(text)
}

/// Takes `type`, which must be this.
fn content(fields: &mut Fields, wanted: &str) -> Result<(), ApiError> {
    match fields.require::<String>("type")? {
        kind if kind == wanted => Ok(()),
        kind => {
            let path = fields.path("type");
            Err(ApiError::invalid(&path, format!("Invalid '{path}': it is \"{wanted}\", not '{kind}'.")))
        }
    }
}
