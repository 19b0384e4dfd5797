use std::path::PathBuf;

use folio_model::backend::{DType, TensorView};
use folio_model::quant::{BlockFormat, Encoding};

use super::header::Section;
use super::*;

const ABOUT: &[u8] = b"what the loader wrote";

fn encodings() -> Vec<Encoding> {
    let plain = [DType::F32, DType::F16, DType::BF16].map(Encoding::Plain);
    plain.into_iter().chain(BlockFormat::ALL.map(Encoding::Block)).collect()
}

/// Small bytes, which mean something in every format.
fn stored(encoding: Encoding, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = rows * encoding.bytes(cols).expect("whole blocks");
    (0..bytes).map(|i| ((i * i + 7 * i) % 15) as u8).collect()
}

fn pack(
    parts: &[(Encoding, usize)],
    cols: usize,
    order: Option<&[u32]>,
    pool: &mut ThreadPool,
) -> PackedMatrix {
    let bytes: Vec<_> = parts.iter().map(|(encoding, rows)| stored(*encoding, *rows, cols)).collect();
    let shapes: Vec<_> = parts.iter().map(|(_, rows)| [*rows, cols]).collect();
    let views: Vec<_> = (parts.iter().zip(&shapes).zip(&bytes))
        .map(|(((encoding, _), shape), bytes)| TensorView { encoding: *encoding, shape, bytes, order })
        .collect();
    PackedMatrix::pack(&views, None, pool).expect("packed")
}

/// Every encoding, a matrix of two of them, one with an order of its own, and vectors.
fn weights(pool: &mut ThreadPool) -> PackedWeights {
    let mut matrices: Vec<_> =
        encodings().iter().map(|encoding| pack(&[(*encoding, 33)], 256, None, pool)).collect();
    let mixed = [BlockFormat::Q4_K, BlockFormat::Q6_K].map(|format| (Encoding::Block(format), 20));
    matrices.push(pack(&mixed, 512, None, pool));
    matrices.push(pack(&[(Encoding::Plain(DType::BF16), 3)], 7, None, pool));
    let order: Vec<u32> = (0..64).rev().collect();
    matrices.push(pack(&[(Encoding::Block(BlockFormat::Q8_0), 16)], 64, Some(&order), pool));
    let vector = |len: usize| {
        let mut values: Vec<f32> = (0..len).map(|i| i as f32 - 2.5).collect();
        values.resize(len.next_multiple_of(LANES), 0.0);
        (len, values)
    };
    PackedWeights { matrices, vectors: vec![vector(16), vector(5)] }
}

struct Folder {
    folder: tempfile::TempDir,
    pool: ThreadPool,
}

impl Folder {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("folder"), pool: ThreadPool::new(2).expect("pool") }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("weights.folio")
    }

    fn written(&mut self) -> PackedWeights {
        let weights = weights(&mut self.pool);
        weights.write(&self.file(), ABOUT, &mut |_, _| true).expect("written");
        weights
    }

    fn load(&mut self) -> Result<PackedWeights, CpuError> {
        PackedFile::open(&self.file())?.load(&mut self.pool)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("folder");
        entries.map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned()).collect()
    }
}

#[test]
fn what_is_written_is_read_again_in_every_encoding() {
    let mut folder = Folder::new();
    let written = folder.written();
    let file = PackedFile::open(&folder.file()).expect("opens");
    assert_eq!((file.about(), file.counts()), (ABOUT, (written.matrices.len(), 2)));
    assert_eq!(file.bytes(), folder.file().metadata().expect("file").len());
    let room = written.file_bytes() + CHUNK as u64;
    assert!((written.file_bytes()..room).contains(&file.bytes()));
    let read = folder.load().expect("loads");
    assert_eq!(read.vectors, written.vectors);
    for (read, written) in read.matrices.iter().zip(&written.matrices) {
        assert_eq!((read.rows, read.cols, &read.order), (written.rows, written.cols, &written.order));
        assert_eq!(read.segments.len(), written.segments.len());
        for (read, written) in read.segments.iter().zip(&written.segments) {
            assert_eq!((read.encoding, read.first_row), (written.encoding, written.first_row));
            assert!(read.memory.is_file() && read.memory.bytes() == written.memory.bytes());
        }
        let mut rows = [vec![0.0; read.cols], vec![0.0; read.cols]];
        for row in 0..read.rows {
            read.lookup(row, &mut rows[0]);
            written.lookup(row, &mut rows[1]);
            assert!(rows[0].iter().zip(&rows[1]).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
    assert_eq!(folder.names(), ["weights.folio"], "no temporary file stays");
}

/// Whoever changes the bytes of panels must change LAYOUT, else old files would be read as new ones.
#[test]
fn the_layout_is_that_of_its_number() {
    let mut pool = ThreadPool::new(1).expect("pool");
    let sums: Vec<u64> = encodings()
        .iter()
        .map(|encoding| {
            let matrix = pack(&[(*encoding, 40)], 512, None, &mut pool);
            XxHash3_64::oneshot(matrix.segments[0].memory.bytes())
        })
        .collect();
    let sums: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let expected = (1, 0x2835_b1a4_b85b_73f3);
    assert_eq!((LAYOUT, XxHash3_64::oneshot(&sums)), expected, "{:#x}", XxHash3_64::oneshot(&sums));
}

#[test]
fn a_file_cut_short_is_refused_wherever_it_ends() {
    let mut folder = Folder::new();
    folder.written();
    let whole = std::fs::read(folder.file()).expect("file");
    let header = header_bytes(&whole).expect("a header") as usize;
    for length in 0..header {
        let parsed = Header::parse(&whole[..length], whole.len() as u64);
        assert!(parsed.is_err(), "{length} bytes of the header");
        assert!(Header::parse(&whole, length as u64).is_err(), "{length} bytes of the file");
    }
    assert!(Header::parse(&whole[..header], whole.len() as u64).is_ok());
    for length in [0, 7, 12, 30, header - 1, header, CHUNK, CHUNK + 5000, whole.len() - 1] {
        std::fs::write(folder.file(), &whole[..length]).expect("written");
        assert!(PackedFile::open(&folder.file()).is_err(), "{length} bytes");
    }
    std::fs::write(folder.file(), [&whole[..], &[0]].concat()).expect("written");
    assert!(matches!(PackedFile::open(&folder.file()), Err(CpuError::Damaged { .. })));
}

#[test]
fn one_bit_of_damage_is_refused_in_every_section() {
    let mut folder = Folder::new();
    folder.written();
    let whole = std::fs::read(folder.file()).expect("file");
    let length = header_bytes(&whole).expect("a header") as usize;
    let mut bytes = whole[..length].to_vec();
    for bit in 0..8 * length {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let parsed =
            header_bytes(&bytes).map(|n| n as usize).and_then(|_| Header::parse(&bytes, whole.len() as u64));
        assert!(parsed.is_err(), "bit {bit} of the header");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    let header = Header::parse(&whole, whole.len() as u64).expect("sound");
    let segments = header.matrices.iter().flat_map(|m| &m.segments).map(|segment| segment.panels);
    let orders = header.matrices.iter().filter_map(|matrix| matrix.order);
    let vectors = header.vectors.iter().map(|vector| vector.values);
    let sections: Vec<Section> = segments.chain(orders).chain(vectors).collect();
    let last = sections.iter().map(|section| section.range().end).max().expect("sections");
    let middles = sections.iter().map(|section| section.range().start + section.bytes as usize / 2);
    let padding = [header.data_start as usize, last, whole.len() - 1];
    let mut bytes = whole.clone();
    for at in middles.chain(padding) {
        bytes[at] ^= 16;
        std::fs::write(folder.file(), &bytes).expect("written");
        match folder.load() {
            Err(CpuError::Damaged { problem, .. }) => assert!(problem.contains("checksum"), "{problem}"),
            other => panic!("byte {at}: {:?}", other.map(|_| ())),
        }
        bytes[at] ^= 16;
    }
    std::fs::write(folder.file(), &bytes).expect("written");
    folder.load().expect("the bytes as they were");
}

/// A header with a checksum of its own, so that the numbers themselves are what is checked.
#[test]
fn hostile_numbers_are_refused_or_harmless() {
    let mut folder = Folder::new();
    folder.written();
    let whole = std::fs::read(folder.file()).expect("file");
    let length = header_bytes(&whole).expect("a header") as usize;
    let mut refused = 0;
    for at in 24..length {
        for number in [0, 1, 0x7f, 0xff] {
            for width in [1, 4, 8] {
                let mut bytes = whole[..length].to_vec();
                let end = length.min(at + width);
                bytes[at..end].fill(number);
                let sum = XxHash3_64::oneshot(&bytes[24..]);
                bytes[16..24].copy_from_slice(&sum.to_le_bytes());
                let Ok(header) = Header::parse(&bytes, whole.len() as u64) else {
                    refused += 1;
                    continue;
                };
                for section in header.matrices.iter().flat_map(|matrix| &matrix.segments) {
                    assert!(section.panels.range().end + crate::memory::SLACK <= whole.len());
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
    assert!(order(&[0, 0, 0, 0, 1, 0, 0, 0]).is_ok());
    assert!(order(&[0, 0, 0, 0, 2, 0, 0, 0]).is_err() && order(&[0; 8]).is_err());
}

#[test]
fn a_file_of_another_kind_or_version_is_told_apart_from_damage() {
    let mut folder = Folder::new();
    folder.written();
    let whole = std::fs::read(folder.file()).expect("file");
    let length = whole.len() as u64;
    assert_eq!(Header::parse(b"GGUF\x03\0\0\0 and so on and on", length), Err(HeaderError::NotPacked));
    let mut other = whole.clone();
    other[8] = 200;
    assert_eq!(Header::parse(&other, length), Err(HeaderError::OtherLayout));
    let mut other = whole;
    other[24] = 200;
    let sum = XxHash3_64::oneshot(&other[24..header_bytes(&other).expect("a header") as usize]);
    other[16..24].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Header::parse(&other, length), Err(HeaderError::OtherLayout));
}

#[test]
fn giving_up_leaves_nothing_and_keeps_what_was_there() {
    let mut folder = Folder::new();
    let weights = weights(&mut folder.pool);
    assert!(weights.write(&folder.file(), ABOUT, &mut |_, _| false).is_err());
    assert!(folder.names().is_empty());
    folder.written();
    assert!(weights.write(&folder.file(), b"newer", &mut |_, _| false).is_err());
    assert_eq!(PackedFile::open(&folder.file()).expect("the old one").about(), ABOUT);
    assert!(weights.write(&folder.folder.path().join("no/folder"), ABOUT, &mut |_, _| true).is_err());
}

/// The mapping outlives its name, and says that it is in use.
#[test]
fn a_file_in_use_is_locked_and_may_be_removed() {
    let mut folder = Folder::new();
    folder.written();
    let read = folder.load().expect("loads");
    let again = File::open(folder.file()).expect("opens");
    assert!(again.try_lock().is_err(), "somebody has it");
    std::fs::remove_file(folder.file()).expect("removed");
    let mut row = vec![0.0; read.matrices[0].cols];
    read.matrices[0].lookup(0, &mut row);
    assert!(row.iter().any(|value| *value != 0.0));
    drop(read);
    assert!(again.try_lock().is_ok(), "nobody has it");
}
