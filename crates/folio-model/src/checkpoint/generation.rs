//! generation_config.json: where generation ends, and the sampling that the model's authors recommend.

use crate::checkpoint::json::{Fields, parse_object};
use crate::error::Result;

/// Defaults a request may override. Absent fields are `None`; nothing is guessed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// From generation_config.json, else from config.json. Sorted, each id once.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
}

impl GenerationConfig {
    /// `own` is generation_config.json, absent in many folders; `config` is config.json.
    pub fn parse(own: Option<(&str, &[u8])>, config: Fields<'_>) -> Result<Self> {
        let mut parsed = Self::default();
        let mut eos = None;
        if let Some((file, bytes)) = own {
            let map = parse_object(file, bytes)?;
            let fields = Fields::new(file, &map);
            eos = fields.token_ids("eos_token_id")?;
            parsed.bos_token_id = single(fields.token_ids("bos_token_id")?);
            parsed.do_sample = fields.flag("do_sample")?;
            parsed.temperature = fields.number_opt("temperature")?.map(|number| number as f32);
            parsed.top_k = fields.number_opt("top_k")?.map(|number| number.max(0.0) as u32);
            parsed.top_p = fields.number_opt("top_p")?.map(|number| number as f32);
            parsed.min_p = fields.number_opt("min_p")?.map(|number| number as f32);
            parsed.repetition_penalty = fields.number_opt("repetition_penalty")?.map(|number| number as f32);
            parsed.max_new_tokens =
                fields.size_opt("max_new_tokens", u32::MAX as usize)?.map(|count| count as u32);
        }
        if eos.is_none() {
            eos = config.token_ids("eos_token_id")?;
        }
        if parsed.bos_token_id.is_none() {
            parsed.bos_token_id = single(config.token_ids("bos_token_id")?);
        }
        let mut eos = eos.unwrap_or_default();
        eos.sort_unstable();
        eos.dedup();
        parsed.eos_token_ids = eos;
        Ok(parsed)
    }
}

fn single(ids: Option<Vec<u32>>) -> Option<u32> {
    ids.and_then(|ids| ids.first().copied())
}
