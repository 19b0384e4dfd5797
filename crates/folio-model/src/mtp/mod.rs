//! MTP heads: the layer that some checkpoints have behind their last one, trained to say the token after the next (DeepSeek-AI, *DeepSeek-V3
//! Technical Report*, arXiv 2412.19437, section 2.2).
//!
//! Owns: the forms in which they are stored ([`form`]), and the head as a [`Program`]. Must never: read a checkpoint other than the model's, or say how a
//! layer is computed: it is a decoder of one layer ([`program`]) that begins otherwise.
//!
//! ```text
//! features = norm(x behind the last layer)       the model's last norm; without it in some forms
//! x        = W_e . norm(embedding) + W_h . norm(features)       [W_e | W_h] is what the checkpoint stores, or the other way round
//! logits   = head . norm(one layer of x); the features of the next row are norm(x), or x
//! ```
//!
//! A form is a row of a table. Which of the two hidden states goes in shows in no error, only in drafts that are right less often: what the
//! rows say was measured by others, see `docs/speculation.md`.

mod form;

pub(crate) use form::Stored;

use crate::backend::Backend;
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::decoder::{self, Taps};
use crate::draft_head::{DraftHead, LoadedHead, bytes_of, load_matrix};
use crate::error::{ModelError, Result};
use crate::loader::{LoadOptions, Loading, check};
use crate::program::{Buf, MatrixId, Op, Program, VectorId};
use crate::quant::Encoding;
use crate::weights::{Load, TensorSpec, WeightSpec, weight_specs};

/// Fields of a config.json that say how many layers a head has.
const LAYERS: [&str; 2] = ["num_nextn_predict_layers", "mtp_num_hidden_layers"];

/// The tensors of a head in each form that is known, for a model of this configuration; whose tables it uses is not among what is known here.
pub fn tensors_read(target: &Config) -> Vec<TensorSpec> {
    let of = |head: Stored| {
        let specs = head.weights().into_iter().chain(head.norms());
        specs.flat_map(|spec| spec.parts).chain([head.projection()]).collect::<Vec<_>>()
    };
    Stored::each_form(target).flat_map(of).collect()
}

/// How many layers of a head the text of a model's config.json speaks of, if of any, and the field that says so. `file` is for messages.
pub fn layers_stated(file: &str, text: &[u8]) -> Result<Option<(&'static str, u64)>> {
    let map = crate::checkpoint::json::parse_object(file, text)?;
    let stated = LAYERS.into_iter().find_map(|field| {
        let value = map.get(field).or_else(|| map.get("text_config")?.get(field));
        value.and_then(serde_json::Value::as_u64).filter(|layers| *layers > 0).map(|layers| (field, layers))
    });
    Ok(stated)
}

/// The head of a model. See the module documentation.
pub struct Head(Stored);

impl Head {
    /// The head in a model's checkpoint, every tensor of it checked. `None`: there is none, nor does config.json speak of one.
    pub fn open(target: &Checkpoint) -> Result<Option<Self>> {
        let stored = Stored::find(target.config(), |name| target.stored_as(name).is_ok());
        let Some(stored) = stored else { return missing(target) };
        let [_, another] = stored.prefixes();
        if let Some(name) = target.tensor_names().find(|name| name.starts_with(&another)) {
            let what = format!("an MTP head of more than one layer (tensor `{name}`)");
            let supported = "supported: MTP heads of one layer".to_owned();
            return Err(ModelError::Unsupported { file: target.location(), what, supported });
        }
        if target.config().windows.iter().any(Option::is_some) {
            let what = "an MTP head of a model with layers that see a window, of which its own may be one";
            let supported = "supported: MTP heads of models whose layers attend to all positions".to_owned();
            return Err(ModelError::Unsupported {
                file: target.location(),
                what: what.to_owned(),
                supported,
            });
        }
        let head = Self(stored);
        head.check(target)?;
        Ok(Some(head))
    }

    /// Every tensor that it needs is there and has the shape that the model's configuration asks for, and there is no other.
    fn check(&self, target: &Checkpoint) -> Result<()> {
        let Self(stored) = self;
        let mut specs = stored.weights();
        specs.extend(stored.norms());
        let projection = stored.projection();
        let encoding = target.tensor(&projection)?.encoding;
        // The embedding and the features are multiplied one after the other.
        if encoding.bytes(stored.config.hidden).is_none() {
            let (file, tensor) = target.stored_as(&projection.name)?;
            let problem = format!("is {encoding}, whose blocks do not end where its halves do");
            return Err(ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem });
        }
        let known = |name: &str| {
            let parts = specs.iter().flat_map(|spec| &spec.parts).chain([&projection]);
            parts.into_iter().any(|part| part.name == name) || name.ends_with(".rotary_emb.inv_freq")
        };
        let [prefix, _] = stored.prefixes();
        if let Some(name) = target.tensor_names().find(|name| name.starts_with(&prefix) && !known(name)) {
            let (file, tensor) = target.stored_as(name)?;
            let problem = format!(
                "is not part of an MTP head whose layer is that of a {} decoder",
                stored.config.family.model_type
            );
            return Err(ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem });
        }
        check(target, specs.iter())?;
        Ok(())
    }

    fn program(&self, target: &Checkpoint, backend: &mut dyn Backend, positions: usize) -> Result<Program> {
        let mut ignore = |_: crate::loader::Progress<'_>| {};
        let Self(stored) = self;
        let mut load = Renamed {
            stored,
            inner: Loading::new(target, &mut *backend, target.start_digest(positions), &mut ignore),
        };
        let weights = weight_specs(&stored.config).try_map(&mut load)?;
        let [token_norm, hidden_norm] = stored.norms();
        let token_norm = load.inner.vector(&token_norm)?;
        let hidden_norm = load.inner.vector(&hidden_norm)?;
        let (hidden, eps) = (stored.config.hidden, stored.config.eps);
        let mut projection = |columns| {
            let label = format!("{} of the MTP head", stored.form.projection);
            load_matrix(target, backend, &label, &[stored.projection()], Some(columns))
        };
        let halves = [projection(0..hidden)?, projection(hidden..2 * hidden)?];
        let [of_token, of_hidden] = if stored.form.hidden_first { [halves[1], halves[0]] } else { halves };

        let encoding = self.weight_encoding(target)?;
        let mut program = decoder::program(&stored.config, &weights, positions, encoding, None);
        let mut buffer = || {
            program.buffers.push(hidden);
            Buf(program.buffers.len() as u32 - 1)
        };
        let [embedding, given, normed, normed_given, own] = std::array::from_fn(|_| buffer());
        let x = program.head.x;
        // Drafts are of tokens alone.
        program.body.retain(|op| !matches!(op, Op::Merge { .. }));
        // The layer begins behind what makes the residual stream of an embedding.
        let is_beginning = |op: &&Op| matches!(op, Op::Embed { .. } | Op::Scale { .. });
        let beginning = program.body.iter().take_while(is_beginning).count();
        let rest = program.body.split_off(beginning);
        for op in &mut program.body {
            match op {
                Op::Embed { out, .. } => *out = embedding,
                Op::Scale { x, .. } => *x = embedding,
                _ => {}
            }
        }
        let linear = |x, weight, out, add| Op::Linear { x, weight, bias: None, out, add };
        program.body.extend([
            Op::RmsNorm { x: embedding, weight: token_norm, eps, out: normed },
            linear(normed, of_token, x, false),
            Op::Input { out: given },
            Op::RmsNorm { x: given, weight: hidden_norm, eps, out: normed_given },
            linear(normed_given, of_hidden, x, true),
        ]);
        program.body.extend(rest);
        program.features = Some(x);
        if stored.form.normed {
            program.body.push(Op::RmsNorm { x, weight: program.head.norm, eps, out: own });
            program.features = Some(own);
        }
        Ok(program)
    }
}

impl DraftHead for Head {
    fn width(&self) -> usize {
        self.0.config.hidden
    }

    fn weight_encoding(&self, target: &Checkpoint) -> Result<Encoding> {
        Ok(target.tensor(&self.0.projection())?.encoding)
    }

    fn bytes_of_a_row(&self, target: &Checkpoint) -> Result<u64> {
        let specs = weight_specs(&self.0.config);
        let of_experts = specs.layers.iter().filter_map(|layer| layer.feed_forward.as_ref());
        let of_experts: Vec<_> = of_experts.flat_map(|mlp| [&mlp.gate_up.label, &mlp.down.label]).collect();
        let output = specs.head.as_ref().unwrap_or(&specs.embed);
        let layer = specs.iter().filter(|spec| spec.label.starts_with("layers."));
        let mut bytes = bytes_of(target, &self.0.projection())?;
        for spec in layer.chain([output]) {
            let parts = self.0.renamed(spec).parts;
            let matrices = parts.iter().filter(|part| part.shape.len() > 1);
            let all = matrices.map(|part| bytes_of(target, part)).sum::<Result<u64>>()?;
            bytes += match &self.0.config.experts {
                Some(experts) if of_experts.contains(&&spec.label) => {
                    all * experts.chosen as u64 / experts.count as u64
                }
                _ => all,
            };
        }
        Ok(bytes)
    }

    fn load_taps(&self, _: &mut dyn Backend) -> Result<Taps> {
        Ok(Taps::Last { normed: self.0.form.normed })
    }

    fn load(
        &self,
        target: &Checkpoint,
        backend: &mut dyn Backend,
        options: &LoadOptions<'_>,
    ) -> Result<LoadedHead> {
        let positions = options.max_model_len.unwrap_or(self.0.config.max_position);
        let kv_layout = options.kv_layout(&self.0.config, target, positions)?;
        let program = self.program(target, backend, positions)?;
        backend.load_program(program, options.max_rows, options.max_logit_rows, positions)?;
        Ok(LoadedHead { vocab: self.0.config.vocab, token_ids: None, kv_layout })
    }
}

/// Loads the weights of a decoder of one layer under the head's names.
struct Renamed<'a, 'b> {
    stored: &'a Stored,
    inner: Loading<'b>,
}

impl Load<ModelError> for Renamed<'_, '_> {
    fn matrix(&mut self, spec: &WeightSpec) -> Result<MatrixId> {
        self.inner.matrix(&self.stored.renamed(spec))
    }

    fn vector(&mut self, spec: &WeightSpec) -> Result<VectorId> {
        self.inner.vector(&self.stored.renamed(spec))
    }
}

/// There are no tensors of a head; config.json may say that there should be.
fn missing(target: &Checkpoint) -> Result<Option<Head>> {
    let Some(text) = target.read("config.json")? else { return Ok(None) };
    let file = format!("config.json of {}", target.location());
    match layers_stated(&file, &text)? {
        None => Ok(None),
        Some((field, layers)) => Err(ModelError::Field {
            file,
            field: field.to_owned(),
            problem: format!(
                "is {layers}, and 0 tensors of an MTP head are there: whoever saved the checkpoint left it out"
            ),
        }),
    }
}
