//! What the tensors of a head are called, and which layer it has.
//!
//! Owns: the forms in which heads are stored, a row each, and how one is found among the names of a checkpoint. Must never: read a tensor, or
//! refuse one: whether a head can be served is decided where it is asked for.

use crate::config::{Config, Feed, Mixer};
use crate::family::ExpertTensors;
use crate::weights::{Made, TensorSpec, WeightSpec, weight_specs};

/// How a family stores its head. In names `N` stands for the number of the head's layer: 0, or in the model's count.
pub(super) struct Form {
    /// What precedes the names of all its tensors, and of the layer's.
    prefix: &'static str,
    layer: &'static str,
    /// That number is the model's count.
    counted: bool,
    /// Of the token's embedding, and of the features.
    token_norm: &'static str,
    hidden_norm: &'static str,
    /// `[hidden, 2 * hidden]`
    pub projection: &'static str,
    /// Its first columns are those of the features.
    pub hidden_first: bool,
    norm: &'static str,
    /// Tables of its own, where it has them.
    embedding: &'static str,
    output: &'static str,
    /// Features are normalized, the model's and its own.
    pub normed: bool,
}

impl Form {
    fn number(&self, target: &Config) -> usize {
        if self.counted { target.layers } else { 0 }
    }

    fn projection_of(&self, target: &Config) -> String {
        named(self.projection, self.number(target))
    }
}

const FORMS: [Form; 3] = [
    // Qwen3-Next, Qwen3.5 and 3.6.
    Form {
        prefix: "mtp.",
        layer: "mtp.layers.N.",
        counted: false,
        token_norm: "mtp.pre_fc_norm_embedding.weight",
        hidden_norm: "mtp.pre_fc_norm_hidden.weight",
        projection: "mtp.fc.weight",
        hidden_first: false,
        norm: "mtp.norm.weight",
        embedding: "mtp.embed_tokens.weight",
        output: "mtp.lm_head.weight",
        normed: true,
    },
    // DeepSeek-V3 and its heirs, GLM-4.5 to 5.
    Form {
        prefix: "model.layers.N.",
        layer: "model.layers.N.",
        counted: true,
        token_norm: "model.layers.N.enorm.weight",
        hidden_norm: "model.layers.N.hnorm.weight",
        projection: "model.layers.N.eh_proj.weight",
        hidden_first: false,
        norm: "model.layers.N.shared_head.norm.weight",
        embedding: "model.layers.N.embed_tokens.weight",
        output: "model.layers.N.shared_head.head.weight",
        normed: true,
    },
    // MiMo.
    Form {
        prefix: "model.mtp_layers.",
        layer: "model.mtp_layers.N.",
        counted: false,
        token_norm: "model.mtp_layers.N.token_layernorm.weight",
        hidden_norm: "model.mtp_layers.N.hidden_layernorm.weight",
        projection: "model.mtp_layers.N.input_proj.weight",
        hidden_first: true,
        norm: "model.mtp_layers.N.final_layernorm.weight",
        embedding: "model.mtp_layers.N.embed_tokens.weight",
        output: "model.mtp_layers.N.lm_head.weight",
        normed: false,
    },
];

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";

/// A head as a checkpoint names it.
pub(crate) struct Stored {
    pub(super) form: &'static Form,
    /// Its layer, as a decoder.
    pub(super) config: Config,
    /// What `N` stands for.
    pub(super) number: usize,
    /// Whose tables it uses.
    embedding: String,
    output: String,
}

impl Stored {
    /// A head in each form, of a model of this configuration whose checkpoint has no table for it.
    pub fn each_form(target: &Config) -> impl Iterator<Item = Self> {
        let projections = FORMS.iter().map(|form| form.projection_of(target));
        projections.filter_map(|projection| Self::find(target, |name| name == projection))
    }

    /// The head of a model of this configuration whose checkpoint has these tensors.
    pub fn find(target: &Config, has: impl Fn(&str) -> bool) -> Option<Self> {
        let form = FORMS.iter().find(|form| has(&form.projection_of(target)))?;
        let number = form.number(target);
        let own = |name: &str| Some(named(name, number)).filter(|name| has(name));
        let embedding = own(form.embedding).unwrap_or_else(|| EMBEDDING.to_owned());
        let of_model = if target.tied { EMBEDDING } else { OUTPUT };
        let output = own(form.output).unwrap_or_else(|| of_model.to_owned());
        // Its layer is one of those that attend to everything, and of a mixture one of those with experts.
        let attends = |mixer: &&Mixer| matches!(mixer, Mixer::Attention | Mixer::Latent(_));
        let mut config = Config {
            layers: 1,
            rotated: vec![true],
            windows: vec![None],
            mixers: vec![target.mixers.iter().find(attends).copied().unwrap_or(Mixer::Attention)],
            feeds: vec![if target.experts.is_some() { Feed::Experts } else { Feed::Dense }],
            tied: output == embedding,
            ..target.clone()
        };
        if let Some(mixture) = config.family.mixture.as_mut()
            && mixture.stored == ExpertTensors::Halves
            && !has(&(named(form.layer, number) + "mlp.experts.gate_up_proj"))
        {
            // As in Qwen3.5, where those of the model's layers are one tensor all the same.
            mixture.stored = ExpertTensors::Each;
        }
        Some(Self { form, config, number, embedding, output })
    }

    /// The weights of its decoder of one layer, under their names here.
    pub fn weights(&self) -> Vec<WeightSpec> {
        weight_specs(&self.config).iter().map(|spec| self.renamed(spec)).collect()
    }

    /// A weight of the decoder of one layer, under its names here.
    pub(super) fn renamed(&self, spec: &WeightSpec) -> WeightSpec {
        let mut spec = spec.clone();
        for part in &mut spec.parts {
            part.name = match part.name.strip_prefix("model.layers.0.") {
                Some(rest) => named(self.form.layer, self.number) + rest,
                None if part.name == EMBEDDING => self.embedding.clone(),
                None if part.name == OUTPUT => self.output.clone(),
                None => named(self.form.norm, self.number),
            };
        }
        spec.label = format!("{} of the MTP head", spec.label);
        spec
    }

    pub(super) fn projection(&self) -> TensorSpec {
        let hidden = self.config.hidden;
        TensorSpec::whole(named(self.form.projection, self.number), &[hidden, 2 * hidden])
    }

    /// What the embedding and the features go through.
    pub(super) fn norms(&self) -> [WeightSpec; 2] {
        [self.form.token_norm, self.form.hidden_norm].map(|name| {
            let label = named(name, self.number);
            let parts = vec![TensorSpec::whole(label.clone(), &[self.config.hidden])];
            WeightSpec { label, parts, made: Made::Linear { plus: self.config.norm_offset, times: 1.0 } }
        })
    }

    /// What the names of all its tensors begin with, and those of a further layer's.
    pub(super) fn prefixes(&self) -> [String; 2] {
        [named(self.form.prefix, self.number), named(self.form.layer, self.number + 1)]
    }
}

fn named(name: &str, number: usize) -> String {
    name.replace(".N.", &format!(".{number}."))
}
