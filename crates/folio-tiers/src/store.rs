//! The store's operations. For now over memory.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use crate::types::{BlockKey, DataKey, DiskConfig, DiskState, DiskStats, Miss, OpenError, PutError, Stored};

#[derive(Debug)]
pub struct DiskStore {
    blocks: RwLock<HashMap<BlockKey, ([u8; 32], Box<[u8]>)>>,
}

impl DiskStore {
    pub fn open(config: DiskConfig) -> Result<Arc<Self>, OpenError> {
        std::fs::create_dir_all(&config.dir).map_err(|error| OpenError::Io { dir: config.dir, error })?;
        Ok(Arc::new(Self { blocks: RwLock::default() }))
    }

    /// Memory only.
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.blocks.read().expect("nobody panics").contains_key(key)
    }

    /// The length of the leading run that is there.
    pub fn run(&self, keys: impl Iterator<Item = BlockKey>) -> usize {
        let mut keys = keys;
        (&mut keys).take_while(|key| self.contains(key)).count()
    }

    pub fn get(&self, key: &BlockKey, data_key: &DataKey, into: &mut [u8]) -> Result<(), Miss> {
        let blocks = self.blocks.read().expect("nobody panics");
        let (owner, bytes) = blocks.get(key).ok_or(Miss::Absent)?;
        if *owner != data_key.0 {
            return Err(Miss::Key);
        }
        if bytes.len() != into.len() {
            return Err(Miss::Length);
        }
        into.copy_from_slice(bytes);
        Ok(())
    }

    pub fn put(&self, key: &BlockKey, data_key: &DataKey, bytes: &[u8]) -> Result<Stored, PutError> {
        let mut blocks = self.blocks.write().expect("nobody panics");
        match blocks.insert(*key, (data_key.0, bytes.into())) {
            None => Ok(Stored::New),
            Some(_) => Ok(Stored::There),
        }
    }

    pub fn close(&self) {}

    pub fn stats(&self) -> DiskStats {
        let blocks = self.blocks.read().expect("nobody panics");
        let bytes = blocks.values().map(|(_, bytes)| bytes.len() as u64).sum();
        DiskStats {
            state: DiskState::On,
            blocks: blocks.len() as u64,
            bytes,
            payload_bytes: bytes,
            segments: 0,
            bytes_written: bytes,
            payload_written: bytes,
            hits: 0,
            misses: [0; Miss::ALL.len()],
            reclaimed_blocks: 0,
            direct: false,
        }
    }

    pub fn is_indexed(&self) -> bool {
        true
    }

    pub fn wait_indexed(&self) {}
}
