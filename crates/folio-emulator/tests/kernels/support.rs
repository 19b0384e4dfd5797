//! What the tests of kernels share: a device with modules, uploads, random numbers, and the metadata of a step.

use folio_cuda::kernels::MODULES;
use folio_cuda::planes::word;
use folio_cuda::{DevicePtr, Driver, Meta, Planes};
use folio_emulator::Order;
use half::bf16;

pub struct Device {
    pub driver: Box<dyn Driver>,
}

/// A device with these modules, or none where there is none.
pub fn device(modules: &[&str], order: Order) -> Option<Device> {
    if !folio_emulator::available() {
        return None;
    }
    let mut driver = folio_emulator::device(order);
    for name in modules {
        driver.load(MODULES.iter().find(|module| module.name == *name).unwrap()).unwrap();
    }
    Some(Device { driver })
}

impl Device {
    pub fn bytes(&mut self, bytes: &[u8]) -> DevicePtr {
        let at = self.driver.allocate(bytes.len() as u64).unwrap();
        self.driver.upload(at, bytes).unwrap();
        at
    }

    pub fn words(&mut self, words: &[u32]) -> DevicePtr {
        self.bytes(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn floats(&mut self, values: &[f32]) -> DevicePtr {
        self.words(&values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>())
    }

    pub fn read(&mut self, at: DevicePtr, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        self.driver.download(at, &mut found).unwrap();
        found
    }

    pub fn read_floats(&mut self, at: DevicePtr, count: usize) -> Vec<f32> {
        self.read(at, 4 * count).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    pub fn read_halves(&mut self, at: DevicePtr, count: usize) -> Vec<u16> {
        self.read(at, 2 * count).as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    }

    /// Both planes of `rows` rows, NaN everywhere.
    pub fn planes(&mut self, rows: usize, width: usize) -> Planes {
        let stride = width.next_multiple_of(32);
        Planes {
            width: width as u32,
            f32: Some(self.bytes(&vec![0xff; 4 * rows * stride])),
            f32_stride: stride as u32,
            bf16: Some(self.bytes(&vec![0xff; 2 * rows * stride])),
            bf16_stride: stride as u32,
        }
    }

    /// An f32 plane of these values, NaN behind the width.
    pub fn plane_of(&mut self, width: usize, values: &[f32]) -> Planes {
        let stride = width.next_multiple_of(32);
        let mut padded = Vec::new();
        for row in values.chunks(width) {
            padded.extend_from_slice(row);
            padded.resize(padded.len().next_multiple_of(stride), f32::NAN);
        }
        let f32 = Some(self.floats(&padded));
        Planes { width: width as u32, f32, f32_stride: stride as u32, bf16: None, bf16_stride: 0 }
    }

    /// The f32 plane without what lies behind the width.
    pub fn f32_rows(&mut self, planes: &Planes, rows: usize) -> Vec<f32> {
        let stride = planes.f32_stride as usize;
        let all = self.read_floats(planes.f32.unwrap(), rows * stride);
        all.chunks(stride).flat_map(|row| row[..planes.width as usize].to_vec()).collect()
    }

    /// The bf16 plane, which must be the f32 plane rounded, and zero behind the width.
    pub fn check_bf16(&mut self, planes: &Planes, rows: usize) {
        let (width, stride) = (planes.width as usize, planes.bf16_stride as usize);
        let full = self.f32_rows(planes, rows);
        let half = self.read_halves(planes.bf16.unwrap(), rows * stride);
        for (full, half) in full.chunks(width).zip(half.chunks(stride)) {
            let want: Vec<u16> = full.iter().map(|value| bf16::from_f32(*value).to_bits()).collect();
            assert_eq!(half[..width], want);
            assert!(half[width..].iter().all(|value| *value == 0), "what lies behind the width is zero");
        }
    }
}

/// Numbers of a seed, -1 to 1.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn unit(&mut self) -> f32 {
        (self.word() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub fn vector(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.unit() * scale).collect()
    }
}

/// One sequence's rows of a step.
pub struct Rows {
    pub first_position: usize,
    pub rows: usize,
    /// Block tables, one for each cache group, of the same length.
    pub tables: Vec<Vec<u32>>,
}

/// The metadata of a step, whose block tables are put on the device: `block_tokens` tokens of a block, at most `tile_tokens` of a tile.
pub fn metadata(device: &mut Device, spans: &[Rows], block_tokens: usize, tile_tokens: usize) -> Vec<u32> {
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    let groups = spans.iter().map(|span| span.tables.len()).max().unwrap_or(0);
    let mut words = vec![0; word::HEADER];
    words[word::ROWS as usize] = rows as u32;
    words[word::SPANS as usize] = spans.len() as u32;
    words[word::GROUPS as usize] = groups as u32;
    let positions = spans.iter().flat_map(|span| span.first_position..span.first_position + span.rows);
    let positions: Vec<u32> = positions.map(|position| position as u32).collect();
    add(&mut words, word::AT_TOKENS, &vec![0; rows]);
    add(&mut words, word::AT_POSITIONS, &positions);
    let of_row = spans.iter().enumerate().flat_map(|(i, span)| std::iter::repeat_n(i as u32, span.rows));
    add(&mut words, word::AT_ROW_SPAN, &of_row.collect::<Vec<u32>>());
    let (mut places, mut first_row) = (Vec::new(), 0);
    let mut tiles = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        let at = device.words(&span.tables.concat()).0;
        let [low, high] = [at as u32, (at >> 32) as u32];
        places.extend([first_row, span.rows as u32, span.first_position as u32, low, high, 0, 0, 0]);
        first_row += span.rows as u32;
        for token in (0..span.rows).step_by(tile_tokens) {
            tiles.extend([i as u32, token as u32, tile_tokens.min(span.rows - token) as u32, 0]);
        }
    }
    add(&mut words, word::AT_SPANS, &places);
    let mut slots = Vec::new();
    for group in 0..groups {
        for span in spans {
            slots.extend((span.first_position..span.first_position + span.rows).map(|position| {
                let block = span.tables[group][position / block_tokens];
                // Of a hole, anything: nothing is written there.
                block.wrapping_mul(block_tokens as u32).wrapping_add((position % block_tokens) as u32)
            }));
        }
    }
    add(&mut words, word::AT_SLOTS, &slots);
    words[word::TILES as usize] = tiles.len() as u32 / 4;
    add(&mut words, word::AT_TILES, &tiles);
    words
}

/// Puts a list at the end and its place in the header.
pub fn add(words: &mut Vec<u32>, at: u32, list: &[u32]) {
    words[at as usize] = words.len() as u32;
    words.extend(list);
}

/// Metadata of a step of rows alone.
pub fn rows_only(device: &mut Device, rows: usize, logit_rows: &[u32]) -> Meta {
    let mut words = vec![0; word::HEADER];
    words[word::ROWS as usize] = rows as u32;
    words[word::LOGIT_ROWS as usize] = logit_rows.len() as u32;
    add(&mut words, word::AT_LOGIT_ROWS, logit_rows);
    Meta(device.words(&words))
}
