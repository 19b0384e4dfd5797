//! From an adapter's file to an [`Adapter`], whatever the format: `peft` and `gguf` say what their tensors are, here they are checked against the model.
//!
//! A file comes from a stranger: every bound is checked before memory is taken, every tensor of it is used or named in an error.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use half::{bf16, f16};
use sha2::{Digest as _, Sha256};

use super::{Adapter, AdapterTarget, AdapterTargets, LANES, LowRank, LowRankPart, gguf, peft};
use crate::backend::DType;
use crate::checkpoint::gguf::{RowOrder, find_in, is_gguf};
use crate::error::{ModelError, Result};
use crate::quant::Encoding;

/// What an adapter may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterLimits {
    pub rank: usize,
    /// Of its file, and of its weights in memory.
    pub bytes: u64,
}

impl Adapter {
    /// Reads an adapter of a model: a PEFT folder, or a GGUF file of llama.cpp or the one that a folder has. Blocks; takes as much memory as the
    /// file and the adapter. The digest is of what is computed: two files that compute the same have the same.
    pub fn read(path: &Path, targets: &AdapterTargets, limits: AdapterLimits) -> Result<Self> {
        if is_gguf(path) {
            return gguf::read(path, targets, limits);
        }
        match find_in(path) {
            Ok(Some(file)) if !path.join(peft::CONFIG).exists() => gguf::read(&file, targets, limits),
            _ => peft::read(path, targets, limits),
        }
    }
}

/// `None`: there is no such file.
pub(super) fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let name = || path.display().to_string();
    let failed = |source| ModelError::Io { file: name(), source };
    let about = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        about => about.map_err(failed)?,
    };
    if !about.is_file() {
        let source = std::io::Error::other("it is no regular file");
        return Err(ModelError::Io { file: name(), source });
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if read as u64 > limit {
        return Err(ModelError::FileTooLarge { file: name(), bytes: about.len(), limit });
    }
    Ok(Some(bytes))
}

/// What a tensor is to the module that it adapts.
#[derive(Clone, Copy)]
pub(super) enum Role {
    A,
    B,
    Bias,
}

pub(super) const ROLES: [Role; 3] = [Role::A, Role::B, Role::Bias];

/// A tensor as a file has it.
pub(super) struct AdapterTensor<'a> {
    pub shape: Vec<usize>,
    /// `Err`: the name of a type that is not served.
    pub encoding: std::result::Result<Encoding, String>,
    pub bytes: &'a [u8],
    pub order: RowOrder,
}

/// The tensors of one module, by role, and what the file calls them.
struct AdapterModule<'a> {
    stored: [String; 3],
    tensors: [Option<AdapterTensor<'a>>; 3],
}

/// A file while it is read.
pub(super) struct AdapterReading<'a> {
    file: &'a str,
    targets: &'a AdapterTargets,
    limits: AdapterLimits,
    /// As [`AdapterTargets::tiled`], of the file.
    tiled: bool,
    /// By the decoder's name.
    modules: BTreeMap<String, AdapterModule<'a>>,
}

impl<'a> AdapterReading<'a> {
    pub fn new(file: &'a str, targets: &'a AdapterTargets, limits: AdapterLimits, tiled: bool) -> Self {
        Self { file, targets, limits, tiled, modules: BTreeMap::new() }
    }

    pub fn problem(&self, tensor: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Tensor { file: self.file.to_owned(), tensor: tensor.to_owned(), problem: problem.into() }
    }

    /// Takes a tensor; `stored`: what those of all roles are called there.
    pub fn put(
        &mut self,
        module: String,
        role: Role,
        stored: [String; 3],
        tensor: AdapterTensor<'a>,
    ) -> std::result::Result<(), &'static str> {
        let module =
            self.modules.entry(module).or_insert(AdapterModule { stored, tensors: [None, None, None] });
        match module.tensors[role as usize].replace(tensor) {
            Some(_) => Err("has a second tensor for the same place"),
            None => Ok(()),
        }
    }

    /// The adapter, once all tensors are there. `scale`: what a module's products with B are multiplied by, given its rank.
    pub fn adapter(&self, scale: impl Fn(&str, usize) -> Result<f64>) -> Result<Adapter> {
        if self.modules.is_empty() {
            let problem = "it has no tensors".to_owned();
            return Err(ModelError::Damaged { file: self.file.to_owned(), problem });
        }
        let mut digest = Sha256::new();
        digest.update(b"folio adapter 2");
        let mut parts: BTreeMap<_, (usize, usize, Vec<LowRankPart>)> = BTreeMap::new();
        let (mut rank, mut memory) = (0, 0u64);
        let tensors = self.modules.values().flat_map(|module| module.tensors.iter().flatten());
        let dtype = stored_dtype(tensors.map(|tensor| tensor.encoding.as_ref().ok()));
        for (name, module) in &self.modules {
            let module = self.module(name, module, &scale)?;
            rank = rank.max(module.rank);
            digest.update((name.len() as u64).to_le_bytes());
            digest.update(name.as_bytes());
            digest.update((module.rank as u64).to_le_bytes());
            digest.update(module.scale.to_le_bytes());
            for values in [Some(&module.down), Some(&module.up), module.bias.as_ref()] {
                digest.update((values.map_or(0, Vec::len) as u64).to_le_bytes());
                values.into_iter().flatten().for_each(|value| digest.update(value.to_le_bytes()));
            }
            for target in module.targets {
                let part = module.part(target);
                let lanes = (part.rank + 1).next_multiple_of(LANES) as u64;
                memory += dtype.size() as u64 * lanes * (target.stored[0] + target.stored[1]) as u64;
                if memory > self.limits.bytes {
                    let limit = self.limits.bytes;
                    return Err(ModelError::FileTooLarge {
                        file: self.file.to_owned(),
                        bytes: memory,
                        limit,
                    });
                }
                let of = (target.rows, target.stored[1], Vec::new());
                parts.entry(target.matrix).or_insert(of).2.push(part);
            }
        }
        let products =
            parts.into_iter().map(|(id, (rows, cols, parts))| (id, LowRank::new(rows, cols, dtype, parts)));
        Ok(Adapter::new(digest.finalize().into(), rank, products))
    }

    fn module(
        &self,
        name: &str,
        module: &AdapterModule<'_>,
        scale: impl Fn(&str, usize) -> Result<f64>,
    ) -> Result<CheckedModule<'a>> {
        let [stored_a, stored_b, stored_bias] = &module.stored;
        let targets = self.targets.get(&format!("{name}.weight")).unwrap_or_default();
        let Some(AdapterTarget { stored: [rows, cols], .. }) = targets.first() else {
            let problem =
                "adapts a module that the model does not have (is this the adapter of another model?)";
            return Err(self.problem(stored_a, problem));
        };
        if !targets.iter().all(|target| target.is_product) {
            let problem = "adapts what is no plain product here (experts, the output table, absorbed projections): not served";
            return Err(self.problem(stored_a, problem));
        }
        if self.tiled != self.targets.tiled && name.contains(".linear_attn.") {
            let problem = "adapts a delta net whose heads the model's file has in another order: take the model and the adapter both from GGUF files, or neither";
            return Err(self.problem(stored_a, problem));
        }
        let [a, b, bias] = [Role::A, Role::B, Role::Bias].map(|role| module.tensors[role as usize].as_ref());
        let (Some(a), Some(b)) = (a, b) else {
            let missing = if a.is_none() { stored_a } else { stored_b };
            return Err(self.problem(missing, "is missing"));
        };
        let (&[rank, inner], &[outer, other]) = (&a.shape[..], &b.shape[..]) else {
            let problem =
                format!("has shape {:?}, B {:?}, expected two dimensions of each", a.shape, b.shape);
            return Err(self.problem(stored_a, problem));
        };
        if inner != *cols || rank == 0 {
            return Err(self.problem(stored_a, format!("has shape {:?}, expected [rank, {cols}]", a.shape)));
        }
        if outer != *rows || other != rank {
            return Err(self.problem(stored_b, format!("has shape {:?}, expected [{rows}, {rank}]", b.shape)));
        }
        if rank > self.limits.rank {
            let most = self.limits.rank;
            let problem = format!("has rank {rank}, more than the {most} that --max-lora-rank allows");
            return Err(self.problem(stored_a, problem));
        }
        let scale = scale(name, rank)? as f32;
        let bias = match bias {
            Some(bias) if bias.shape != [*rows] => {
                let problem = format!("has shape {:?}, expected [{rows}]", bias.shape);
                return Err(self.problem(stored_bias, problem));
            }
            Some(bias) => Some(self.values(stored_bias, bias)?),
            None => None,
        };
        let (down, up) = (self.values(stored_a, a)?, self.values(stored_b, b)?);
        Ok(CheckedModule { targets, rank, scale, down, up, bias })
    }

    /// The values of a tensor, which are numbers.
    fn values(&self, name: &str, tensor: &AdapterTensor<'_>) -> Result<Vec<f32>> {
        let (rows, count) = (tensor.shape[0], tensor.shape.iter().product::<usize>());
        let encoding = tensor
            .encoding
            .as_ref()
            .map_err(|other| self.problem(name, format!("has dtype {other}, expected F32, F16 or BF16")))?;
        if !tensor.order.fits(rows) {
            return Err(self.problem(name, format!("has {rows} rows, which the heads do not divide")));
        }
        let bytes = tensor.order.arranged(tensor.bytes, rows);
        let values: Vec<f32> = match encoding {
            Encoding::Plain(DType::F32) => {
                bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
            Encoding::Plain(DType::F16) => {
                bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
            }
            Encoding::Plain(DType::BF16) => {
                bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
            }
            Encoding::Block(format) => {
                let mut values = vec![0.0; bytes.len() / format.bytes() * format.values()];
                format.decode(&bytes, &mut values);
                values
            }
        };
        assert_eq!(values.len(), count, "a header's ranges are what its shapes take");
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.problem(name, format!("holds {} at {at}, which is no number", values[at]))),
            None => Ok(values),
        }
    }
}

/// The type that holds every value of a file exactly. `None`: of a tensor that is refused.
fn stored_dtype<'a>(mut encodings: impl Iterator<Item = Option<&'a Encoding>>) -> DType {
    match encodings.next() {
        Some(Some(first @ Encoding::Plain(dtype))) if encodings.all(|other| other == Some(first)) => *dtype,
        _ => DType::F32,
    }
}

/// A module that was read and checked.
struct CheckedModule<'t> {
    targets: &'t [AdapterTarget],
    rank: usize,
    /// What B's products and its bias are multiplied by.
    scale: f32,
    down: Vec<f32>,
    up: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl CheckedModule<'_> {
    fn part(&self, target: &AdapterTarget) -> LowRankPart {
        let pick = |values: &[f32]| {
            let period = target.pick.period * (values.len() / target.stored[0]);
            let each = values.len() / target.stored[0];
            let (first, rows) = (target.pick.first * each, target.pick.rows * each);
            values.chunks_exact(period).flat_map(|of| &of[first..first + rows]).copied().collect::<Vec<f32>>()
        };
        let bias = self.bias.as_deref().map(pick);
        LowRankPart {
            first_row: target.first_row,
            down: self.down.clone(),
            up: pick(&self.up),
            bias,
            rank: self.rank,
            scale: self.scale,
        }
    }
}
