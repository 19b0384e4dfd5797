//! EAGLE-3 heads: a drafter of one layer that reads what a model has computed (Li, Wei, Zhang and Zhang, *EAGLE-3: Scaling up Inference
//! Acceleration of Large Language Models via Training-Time Test*, arXiv 2503.01840).
//!
//! Owns: reading the checkpoints that people have ([`settings`]), which of their tensors go where, and the head as a [`Program`]. Must never:
//! know who drafts, or change a token of the model.
//!
//! Its features ([`draft_head`](crate::draft_head)) are a product (`fc`) of the model's residual stream at some layers, side by side; behind
//! what the model has computed, the row's own residual stream takes their place. In Folio the product is the model's: a model with a head gives
//! each row's features out as they go into the head, whose program takes rows of one width from either.
//!
//! ```text
//! features = sum of fc_i . norm_i(x before layer i)            in the model; norm_i only with `fc_norm`,
//!            or fc . norm([x before layer i, ...])             with `norm_before_fc`
//! qkv      = W_e . norm(embedding) + W_f . norm(features)       [W_e | W_f] is what the checkpoint stores
//! x        = features (or norm(features)) + W_o . attention + mlp(norm)
//! logits   = head . norm(x); the features of the next row are x, or norm(x) with `norm_output`
//! ```

mod settings;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

use settings::Settings;
pub use settings::is_head;

use crate::backend::Backend;
use crate::checkpoint::{Checkpoint, Source};
use crate::config::Config;
use crate::decoder::{Tap, Taps};
use crate::draft_head::{DraftHead, LoadedHead, bytes_of, load_matrix};
use crate::error::{ModelError, Result};
use crate::loader::LoadOptions;
use crate::program::{AttentionSpec, Buf, MatrixId, Op, Program, RopeId, VectorId};
use crate::quant::Encoding;
use crate::weights::TensorSpec;

/// A head whose files are open and fit each other and the model that it was opened for. No weight is read.
pub struct Head {
    settings: Settings,
    checkpoint: Checkpoint,
    /// Of the model.
    hidden: usize,
    layers: usize,
    /// What precedes the names of the layer's tensors: "midlayer" or "layers.0".
    layer: &'static str,
    /// Of each token that it can say, the model's; `None`: they are the model's.
    token_ids: Option<Arc<[u32]>>,
    /// It has tables of its own; else they are the model's.
    has_embedding: bool,
    has_output: bool,
    qkv_bias: bool,
    o_bias: bool,
}

/// The layers of a model of this configuration whose inputs a head reads, by the text of its config.json alone. `file` is for messages.
pub fn layers_read(file: &str, text: &[u8], target: &Config) -> Result<Vec<usize>> {
    Ok(Settings::parse(file, text, target)?.taps)
}

impl Head {
    /// Opens the folder of a head for a model, and checks every tensor. The model's configuration is that of `target`.
    pub fn open(folder: &Path, target: &Checkpoint) -> Result<Self> {
        Self::of(Source::Folder(folder.to_owned()), target)
    }

    /// The same of files, by name, that are built into the program.
    pub fn from_bytes(files: &'static [(&'static str, &'static [u8])], target: &Checkpoint) -> Result<Self> {
        Self::of(Source::Embedded(files), target)
    }

    fn of(source: Source, target: &Checkpoint) -> Result<Self> {
        let (text, settings) = Settings::read(&source, target.config())?;
        no_pickle(&source)?;
        let checkpoint = Checkpoint::of_no_decoder(source, text, settings.config.clone())?;
        let stored = |name: &str| checkpoint.stored_as(name).is_ok();
        let layer = if stored("midlayer.hidden_norm.weight") { "midlayer" } else { "layers.0" };
        let has_bias = |name: &str| stored(&format!("{layer}.self_attn.{name}.bias"));
        let (qkv_bias, o_bias) = (has_bias("q_proj"), has_bias("o_proj"));
        settings.fits(stored(EMBEDDING), stored(OUTPUT), target.config())?;
        let token_ids = vocabulary::token_ids(&checkpoint, settings.draft_vocab, settings.config.vocab)?;
        let head = Self {
            hidden: target.config().hidden,
            layers: target.config().layers,
            layer,
            token_ids,
            has_embedding: stored(EMBEDDING),
            has_output: stored(OUTPUT),
            qkv_bias,
            o_bias,
            settings,
            checkpoint,
        };
        head.check()?;
        Ok(head)
    }

    /// The same, reading the layers so many places behind those that its config.json names. `None`: there are none.
    pub fn reading_behind(mut self, places: isize) -> Option<Self> {
        let layers = self.layers;
        for tap in &mut self.settings.taps {
            *tap = tap.checked_add_signed(places).filter(|tap| *tap <= layers)?;
        }
        Some(self)
    }

    /// Layers of the model whose inputs it reads.
    pub fn taps(&self) -> &[usize] {
        &self.settings.taps
    }

    fn config(&self) -> &Config {
        &self.settings.config
    }

    fn spec(&self, name: &str, shape: &[usize]) -> TensorSpec {
        TensorSpec::whole(name.replace("LAYER", self.layer), shape)
    }

    /// `fc` first.
    fn matrices(&self) -> Vec<TensorSpec> {
        let config = self.config();
        let (hidden, inner, kv) = (config.hidden, config.intermediate, config.head_sizes(0).kv_width());
        let mut specs = vec![
            self.spec("fc.weight", &[hidden, self.settings.taps.len() * self.hidden]),
            self.spec("LAYER.self_attn.q_proj.weight", &[config.q_width(0), 2 * hidden]),
            self.spec("LAYER.self_attn.k_proj.weight", &[kv, 2 * hidden]),
            self.spec("LAYER.self_attn.v_proj.weight", &[kv, 2 * hidden]),
            self.spec("LAYER.self_attn.o_proj.weight", &[hidden, config.q_width(0)]),
            self.spec("LAYER.mlp.gate_proj.weight", &[inner, hidden]),
            self.spec("LAYER.mlp.up_proj.weight", &[inner, hidden]),
            self.spec("LAYER.mlp.down_proj.weight", &[hidden, inner]),
        ];
        specs.extend(self.has_embedding.then(|| self.spec(EMBEDDING, &[config.vocab, hidden])));
        specs.extend(self.has_output.then(|| self.spec(OUTPUT, &[self.settings.draft_vocab, hidden])));
        specs
    }

    fn vectors(&self) -> Vec<TensorSpec> {
        let config = self.config();
        let norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"];
        let mut specs: Vec<TensorSpec> =
            norms.map(|norm| self.spec(&format!("LAYER.{norm}.weight"), &[config.hidden])).into();
        specs.push(self.spec("norm.weight", &[config.hidden]));
        if self.settings.fc_norm {
            let norms = 0..self.settings.taps.len();
            specs.extend(norms.map(|tap| self.spec(&format!("fc_norm.{tap}.weight"), &[self.hidden])));
        }
        let all = self.settings.taps.len() * self.hidden;
        specs.extend(self.settings.norm_before_fc.then(|| self.spec(INPUT_NORM, &[all])));
        let kv = config.head_sizes(0).kv_width();
        let biases = [("q_proj", config.q_width(0)), ("k_proj", kv), ("v_proj", kv)];
        let bias = |(name, rows): (&str, usize)| self.spec(&format!("LAYER.self_attn.{name}.bias"), &[rows]);
        specs.extend(biases.into_iter().filter(|_| self.qkv_bias).map(bias));
        specs.extend(self.o_bias.then(|| bias(("o_proj", config.hidden))));
        specs
    }

    /// Every tensor that it needs is there and has the shape that its configuration and the model's ask for, and there is no other.
    fn check(&self) -> Result<()> {
        let specs = [self.matrices(), self.vectors()].concat();
        for spec in &specs {
            let tensor = self.checkpoint.tensor(spec)?;
            if tensor.encoding.plain().is_none() {
                let (file, tensor) = self.checkpoint.stored_as(&spec.name)?;
                let problem = "is quantized; weights of heads are read in BF16, F16 and F32".to_owned();
                return Err(ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem });
            }
        }
        let known = |name: &&str| {
            specs.iter().any(|spec| spec.name == **name)
                || vocabulary::TENSORS.contains(name)
                || name.ends_with(".rotary_emb.inv_freq")
        };
        match self.checkpoint.tensor_names().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => {
                let (file, tensor) = self.checkpoint.stored_as(name)?;
                let problem = "is not part of an EAGLE-3 head as its config.json describes it".to_owned();
                Err(ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem })
            }
        }
    }

    fn program(&self, target: &Checkpoint, backend: &mut dyn Backend, positions: usize) -> Result<Program> {
        let config = self.config();
        let matrices = self.matrices();
        let (qkv, hidden, eps) = (&matrices[1..4], config.hidden, config.eps);
        let embed = match self.has_embedding {
            true => self.matrix(backend, &[self.spec(EMBEDDING, &[config.vocab, hidden])], None)?,
            false => of_model(target, backend, EMBEDDING_OF_MODEL)?,
        };
        let of_embedding = self.matrix(backend, qkv, Some(0..hidden))?;
        let of_features = self.matrix(backend, qkv, Some(hidden..2 * hidden))?;
        let o = self.matrix(backend, &matrices[4..5], None)?;
        let gate_up = self.matrix(backend, &matrices[5..7], None)?;
        let down = self.matrix(backend, &matrices[7..8], None)?;
        let vocab = self.settings.draft_vocab;
        let output = match self.has_output {
            true => self.matrix(backend, &[self.spec(OUTPUT, &[vocab, hidden])], None)?,
            false if target.config().tied => embed,
            false => of_model(target, backend, OUTPUT)?,
        };
        let vectors = self.vectors();
        let mut norms = Vec::with_capacity(4);
        for spec in &vectors[..4] {
            norms.push(self.vector(backend, std::slice::from_ref(spec))?);
        }
        let biases = vectors.iter().filter(|spec| spec.name.ends_with("_proj.bias"));
        let (o_bias, qkv_bias): (Vec<_>, Vec<_>) =
            biases.cloned().partition(|spec| spec.name.ends_with("o_proj.bias"));
        let mut bias = |specs: &[TensorSpec]| match specs {
            [] => Ok(None),
            specs => self.vector(backend, specs).map(Some),
        };
        let (qkv_bias, o_bias) = (bias(&qkv_bias)?, bias(&o_bias)?);

        let widths =
            [hidden, hidden, hidden, hidden, config.qkv_width(0), config.q_width(0), config.intermediate];
        let mut program = Program { buffers: widths.to_vec(), ..Program::default() };
        let [x, features, embedding, normed, qkv, attended, inner] = [0, 1, 2, 3, 4, 5, 6].map(Buf);
        let norm = |x, weight, out| Op::RmsNorm { x, weight, eps, out };
        let linear = |x, weight, bias, out, add| Op::Linear { x, weight, bias, out, add };
        // Attention reads the features normalized; they go on as they are, or so too.
        let (of_x, normed_features) = match self.settings.norm_before_residual {
            true => (features, x),
            false => (x, features),
        };
        program.ropes.push(config.rope.table(positions));
        program.attention.push(self.attention());
        program.body = vec![
            Op::Embed { table: embed, out: embedding },
            Op::Input { out: of_x },
            norm(embedding, norms[0], normed),
            linear(normed, of_embedding, qkv_bias, qkv, false),
            norm(of_x, norms[1], normed_features),
        ];
        // What is multiplied is read from a buffer that nobody adds to.
        let multiplied = match self.settings.norm_before_residual {
            true => {
                program.body.push(Op::Copy { x, out: normed });
                normed
            }
            false => normed_features,
        };
        program.body.extend([
            linear(multiplied, of_features, None, qkv, true),
            Op::WriteKv { qkv, spec: 0 },
            Op::Attention { qkv, spec: 0, out: attended },
            linear(attended, o, o_bias, x, true),
            norm(x, norms[2], normed),
            Op::GatedLinear {
                x: normed,
                weight: gate_up,
                bias: None,
                activation: config.activation,
                out: inner,
            },
            linear(inner, down, None, x, true),
        ]);
        program.features = Some(x);
        if self.settings.norm_output {
            program.body.push(norm(x, norms[3], normed));
            program.features = Some(normed);
        }
        program.head = crate::program::Head { x, norm: norms[3], eps, matrix: output, vocab, softcap: None };
        Ok(program)
    }

    fn attention(&self) -> AttentionSpec {
        let config = self.config();
        AttentionSpec {
            group: 0,
            layer: 0,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale as f32,
            softcap: None,
            window: None,
            chunked: false,
            temper: None,
            sinks: None,
            rope: Some(RopeId(0)),
            own_kv: true,
            q_norm: None,
            k_norm: None,
            v_norm: None,
            norm_last: false,
            norm_eps: config.eps,
        }
    }

    /// Tensors stacked along rows, of each all columns or some.
    fn matrix(
        &self,
        backend: &mut dyn Backend,
        specs: &[TensorSpec],
        columns: Option<std::ops::Range<usize>>,
    ) -> Result<MatrixId> {
        load_matrix(&self.checkpoint, backend, &self.label(&specs[0]), specs, columns)
    }

    fn vector(&self, backend: &mut dyn Backend, specs: &[TensorSpec]) -> Result<VectorId> {
        let tensors = specs.iter().map(|spec| {
            let tensor = self.checkpoint.tensor(spec)?;
            Ok((tensor, tensor.read()?))
        });
        let parts = tensors.collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = parts.iter().map(|(tensor, values)| tensor.view(values)).collect();
        Ok(backend.load_vector(&self.label(&specs[0]), &views)?)
    }

    fn label(&self, spec: &TensorSpec) -> String {
        format!("{} of the head", spec.name)
    }
}

impl DraftHead for Head {
    fn width(&self) -> usize {
        self.config().hidden
    }

    fn weight_encoding(&self, _: &Checkpoint) -> Result<Encoding> {
        Ok(self.checkpoint.tensor(&self.matrices()[0])?.encoding)
    }

    fn bytes_of_a_row(&self, target: &Checkpoint) -> Result<u64> {
        let mut bytes = 0;
        for spec in self.matrices()[1..].iter().filter(|spec| spec.name != EMBEDDING) {
            bytes += bytes_of(&self.checkpoint, spec)?;
        }
        if !self.has_output {
            let output = if target.config().tied { EMBEDDING_OF_MODEL } else { OUTPUT };
            bytes += bytes_of(target, &table(target, output))?;
        }
        Ok(bytes)
    }

    fn load_taps(&self, backend: &mut dyn Backend) -> Result<Taps> {
        let eps = self.config().eps;
        let fc = self.matrices().swap_remove(0);
        if self.settings.norm_before_fc {
            let norm = self.spec(INPUT_NORM, &[fc.shape[1]]);
            return Ok(Taps::Product {
                width: self.width(),
                before: self.settings.taps.clone(),
                norm: (self.vector(backend, &[norm])?, eps),
                matrix: self.matrix(backend, &[fc], None)?,
            });
        }
        let mut of = Vec::with_capacity(self.settings.taps.len());
        for (index, &before) in self.settings.taps.iter().enumerate() {
            let columns = index * self.hidden..(index + 1) * self.hidden;
            let matrix = self.matrix(backend, std::slice::from_ref(&fc), Some(columns))?;
            let norm = match self.settings.fc_norm {
                false => None,
                true => {
                    let spec = self.spec(&format!("fc_norm.{index}.weight"), &[self.hidden]);
                    Some((self.vector(backend, &[spec])?, eps))
                }
            };
            of.push(Tap { before, norm, matrix });
        }
        Ok(Taps::Products { width: self.width(), of })
    }

    fn load(
        &self,
        target: &Checkpoint,
        backend: &mut dyn Backend,
        options: &LoadOptions<'_>,
    ) -> Result<LoadedHead> {
        let positions = options.max_model_len.unwrap_or(target.config().max_position);
        let kv_layout = options.kv_layout(self.config(), &self.checkpoint, positions)?;
        let program = self.program(target, backend, positions)?;
        backend.load_program(program, options.max_rows, options.max_logit_rows, positions)?;
        Ok(LoadedHead { vocab: self.settings.draft_vocab, token_ids: self.token_ids.clone(), kv_layout })
    }
}

const EMBEDDING: &str = "embed_tokens.weight";
/// With `norm_before_fc`.
const INPUT_NORM: &str = "input_norm.weight";
const OUTPUT: &str = "lm_head.weight";
const EMBEDDING_OF_MODEL: &str = "model.embed_tokens.weight";

/// A table of the model.
fn table(target: &Checkpoint, name: &str) -> TensorSpec {
    let config = target.config();
    TensorSpec::whole(name.to_owned(), &[config.vocab, config.hidden])
}

/// A table that a head shares with its model.
fn of_model(target: &Checkpoint, backend: &mut dyn Backend, name: &str) -> Result<MatrixId> {
    let tensor = target.tensor(&table(target, name))?;
    let values = tensor.read()?;
    Ok(backend.load_matrix(name, &[tensor.view(&values)])?)
}

/// The authors' own checkpoints are pickled, for which there is no reader.
fn no_pickle(source: &Source) -> Result<()> {
    const PICKLED: &str = "pytorch_model.bin";
    let Source::Folder(folder) = source else { return Ok(()) };
    let has = |file: &str| folder.join(file).is_file();
    if !has(PICKLED) || has("model.safetensors") || has("model.safetensors.index.json") {
        return Ok(());
    }
    let missing = format!(
        "its weights are in {PICKLED}, which is not read; convert it to model.safetensors: python -c \"import torch, safetensors.torch as s; \
         s.save_file(torch.load('{PICKLED}', weights_only=True), 'model.safetensors')\""
    );
    Err(ModelError::Folder { folder: folder.display().to_string(), missing })
}
