//! Reading the options of a quantization, none of which may be passed over.

use serde_json::Value;

use crate::checkpoint::json::Fields;
use crate::error::{ModelError, Result};

/// Largest group or block that a checkpoint may claim.
const GROUP_MAX: i64 = 1 << 20;

/// An object of options.
#[derive(Clone, Copy)]
pub struct Options<'a>(pub Fields<'a>);

impl<'a> Options<'a> {
    /// The refusal of an option's value.
    pub fn unsupported(&self, name: &str, what: &str, supported: &str) -> ModelError {
        // The field's full name is part of every problem with it.
        let field = match self.0.problem(name, "") {
            ModelError::Field { field, .. } => field,
            _ => name.to_owned(),
        };
        ModelError::Unsupported {
            file: self.0.file().to_owned(),
            what: format!("{what} (field `{field}`)"),
            supported: supported.to_owned(),
        }
    }

    /// Refuses an option that is none of `known` and says anything.
    pub fn only(&self, known: &[&str], supported: &str) -> Result<()> {
        let says = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        let unknown = self.0.entries().find(|(name, value)| says(value) && !known.contains(name));
        match unknown {
            Some((name, _)) => Err(self.unsupported(name, "an option of the quantization", supported)),
            None => Ok(()),
        }
    }

    /// Refuses an option that says anything, where it would change what is computed.
    pub fn none(&self, name: &str, what: &str, supported: &str) -> Result<()> {
        let empty = match self.0.value(name) {
            None | Some(Value::Bool(false)) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        if empty { Ok(()) } else { Err(self.unsupported(name, what, supported)) }
    }

    /// A number of bits, one of `served`.
    pub fn bits(&self, name: &str, served: &[u64], method: &str) -> Result<u32> {
        let bits = self.0.size(name, 64)? as u64;
        if served.contains(&bits) {
            return Ok(bits as u32);
        }
        let list = served.iter().map(u64::to_string).collect::<Vec<_>>().join(" and ");
        Err(self.unsupported(name, &format!("{method} with {bits} bits"), &format!("supported: {list}")))
    }

    /// Columns of a group; `None` for -1 or absent, one group a row.
    pub fn group(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.0.value(name) else { return Ok(None) };
        match value.as_i64() {
            Some(-1) => Ok(None),
            Some(group) if (1..=GROUP_MAX).contains(&group) => Ok(Some(group as usize)),
            _ => Err(self.0.problem(name, format!("is {value}, expected -1 or a number of columns"))),
        }
    }

    /// Rows and columns of a block.
    pub fn block(&self, name: &str) -> Result<Option<[usize; 2]>> {
        let Some(list) = self.0.list(name)? else { return Ok(None) };
        let sizes: Option<Vec<usize>> = list
            .iter()
            .map(|size| size.as_i64().filter(|size| (1..=GROUP_MAX).contains(size)).map(|size| size as usize))
            .collect();
        match sizes.as_deref() {
            Some([rows, cols]) => Ok(Some([*rows, *cols])),
            _ => Err(self.0.problem(name, "must hold the rows and columns of a block")),
        }
    }

    /// Strings of a list.
    pub fn texts(&self, name: &str) -> Result<Vec<&'a str>> {
        let Some(list) = self.0.list(name)? else { return Ok(Vec::new()) };
        let texts: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
        texts.ok_or_else(|| self.0.problem(name, "must hold only strings"))
    }
}
