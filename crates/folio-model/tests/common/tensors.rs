//! A safetensors file taken apart, so that a test can change one of its tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

pub struct Stored {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub struct File {
    path: PathBuf,
    pub tensors: BTreeMap<String, Stored>,
}

impl File {
    pub fn read(path: &Path) -> Self {
        let file = fs::read(path).unwrap();
        let start = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&file[8..start]).unwrap();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
            let number = |value: &Value| value.as_u64().unwrap() as usize;
            let range = start + number(&entry["data_offsets"][0])..start + number(&entry["data_offsets"][1]);
            let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            (name, Stored { dtype, shape, bytes: file[range].to_vec() })
        });
        Self { path: path.to_owned(), tensors: tensors.collect() }
    }

    pub fn write(&self) {
        let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
        for (name, tensor) in &self.tensors {
            let start = data.len();
            data.extend(&tensor.bytes);
            let entry =
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]});
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string().into_bytes();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        fs::write(&self.path, file).unwrap();
    }

    pub fn get(&mut self, name: &str) -> &mut Stored {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }
}
