//! What a checkpoint has beside its decoder for images and sounds: it is not served, and whoever starts such a model is told so.
//!
//! Owns: what these parts are called. Must never: decide whether a tensor is read: of a tower none is. Cost: a look at every name.

use super::Checkpoint;

/// Parts that are not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tower {
    /// With the projector that brings images to the width of the decoder.
    Vision,
    /// Likewise of sounds.
    Audio,
}

impl Tower {
    pub const ALL: [Self; 2] = [Self::Vision, Self::Audio];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Vision => "vision tower",
            Self::Audio => "audio tower",
        }
    }

    /// The first part of its tensors' names, behind `model.` or not.
    const fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Vision => {
                &["vision_tower", "vision_model", "visual", "multi_modal_projector", "embed_vision"]
            }
            Self::Audio => &["audio_tower", "audio_model", "embed_audio"],
        }
    }

    fn of(tensor: &str) -> Option<Self> {
        let first = tensor.strip_prefix("model.").unwrap_or(tensor).split('.').next()?;
        Self::ALL.into_iter().find(|tower| tower.prefixes().contains(&first))
    }
}

impl Checkpoint {
    /// The towers that it has, each with the number of its tensors, which nothing reads.
    pub fn skipped_towers(&self) -> Vec<(Tower, usize)> {
        let towers: Vec<Tower> = self.tensor_names().filter_map(Tower::of).collect();
        let count = |tower: Tower| towers.iter().filter(|other| **other == tower).count();
        Tower::ALL.map(|tower| (tower, count(tower))).into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FIXTURES, fixture};

    #[test]
    fn towers_are_counted_and_nothing_else_is_one() {
        for name in FIXTURES {
            let checkpoint = Checkpoint::open(fixture(name)).unwrap();
            let expected: usize = match *name {
                "gemma3" => 34,
                "gemma4" => 16,
                "llama4" => 26,
                "mistral3" => 15,
                "qwen3_5" | "qwen3_5_moe" => 21,
                _ => 0,
            };
            let found = checkpoint.skipped_towers();
            let towers: Vec<_> = (expected > 0).then_some((Tower::Vision, expected)).into_iter().collect();
            assert_eq!(found, towers, "{name}");
        }
        assert_eq!(Tower::of("model.audio_tower.conformer.0.norm.weight"), Some(Tower::Audio));
        assert_eq!(Tower::of("embed_audio.embedding_projection.weight"), Some(Tower::Audio));
        // Of the decoder.
        for tensor in ["model.layers.0.visual.weight", "model.embed_tokens.weight", "lm_head.weight"] {
            assert_eq!(Tower::of(tensor), None, "{tensor}");
        }
    }
}
