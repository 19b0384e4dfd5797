//! Layers that are one part and no more, and which part each is.

use serde_json::Value;

use super::{Feed, LAYERS_MAX, LayerType, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::Result;

/// What mixes positions in each layer, and what feeds forward: one of the two.
pub(super) fn blocks(fields: Fields<'_>) -> Result<(Vec<LayerType>, Vec<Feed>)> {
    let names: Vec<&str> = match (fields.list("layers_block_type")?, fields.text("hybrid_override_pattern")?)
    {
        (Some(list), _) => list.iter().map(|value| value.as_str().unwrap_or_default()).collect(),
        (None, Some(pattern)) => pattern.split("").filter(|name| !name.is_empty()).collect(),
        (None, None) => {
            let problem = "is missing, and so is hybrid_override_pattern: they say what each layer is";
            return Err(fields.problem("layers_block_type", problem));
        }
    };
    let stated = fields.value("num_hidden_layers").and_then(Value::as_u64);
    let layers = names.len();
    if !(1..=LAYERS_MAX).contains(&layers) || stated.is_some_and(|stated| stated != layers as u64) {
        let expected =
            stated.map_or(format!("1 to {LAYERS_MAX}"), |stated| format!("num_hidden_layers = {stated}"));
        return Err(
            fields.problem("layers_block_type", format!("names {layers} layers, expected {expected}"))
        );
    }
    let (mut types, mut feeds) = (Vec::with_capacity(layers), Vec::with_capacity(layers));
    for name in names {
        let (kind, feed) = match name {
            "M" | "mamba" | "linear_attention" => (LayerType::Linear, Feed::Nothing),
            "*" | "attention" | "full_attention" => (LayerType::Full, Feed::Nothing),
            "-" | "mlp" => (LayerType::Nothing, Feed::Dense),
            "E" | "moe" => (LayerType::Nothing, Feed::Experts),
            _ => {
                let name: String = name.chars().take(60).collect();
                let what = format!("layer type `{name}` (field `layers_block_type`)");
                return Err(unsupported(fields, what, "mamba, attention, mlp, moe"));
            }
        };
        types.push(kind);
        feeds.push(feed);
    }
    Ok((types, feeds))
}
