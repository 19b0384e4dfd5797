//! Where the next block goes, and what has to go for it.
//!
//! Records are appended to one segment, the open one, which takes its room on disk when it is begun and is cut to its size when it is
//! full. Room is charged before it is taken and given back after it is free, so the directory is never larger than it may be.
//! Content of each class has segments of its own, since whole segments go: of the lowest class first. Where there are few segments, all is of one class.
//!
//! Within a class the segment goes whose blocks are worth the least for what it takes ([`Worth`]). Those of its blocks that are worth more than
//! the average of their class are written again, the most valuable first, at the beginning of the segment that is begun: up to a quarter of that, so
//! that at most a third more is written than what comes. Nothing is opened for it: records hold in any place.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use folio_engine::{Medium, TierEvent};
use rustc_hash::FxHashSet;

use crate::export;
use crate::index::{Fingerprint, Place};
use crate::io::{File, Folder, Listed, PAGE, Pages, read_full, write_full};
use crate::record::{self, Parsed, VERSION, word};
use crate::segment::{self, Contents, Entry, Found};
use crate::store::{DiskStore, Segment, lock};
use crate::types::{About, Class, DiskConfig, OpenError, PutError};
use crate::wear::Wear;
use crate::worth::{Held, UseClock, Worth};

/// Of the directory: the number of the next segment, so that no file name is used twice, and who said so. `FOLIOKVD`, version and
/// number in 4 bytes each, the CRC-32C of these 16; in 8 bytes a time that has passed, in seconds since 1970, and the CRC-32C of all 28. These
/// bytes stay what they are in every version: versions take turns in a directory, and each leaves the others' segments alone.
const ABOUT: &str = "store";
const MAGIC: &[u8; 8] = b"FOLIOKVD";

/// Of segments that were not ended, so many are read to the end of each record: in the last ones a write may have been under way. What is
/// wrong in older ones shows when it is read.
const TORN: usize = 8;

/// With fewer segments than this they are not told apart by class.
const SEGMENTS_FOR_CLASSES: u64 = 8;

/// Of a segment, one in so many pages at most holds what was written before.
const COPIED_SHARE: usize = 4;

pub(crate) struct Writer {
    /// By class.
    open: [Option<Arc<Open>>; Class::ALL.len()],
    pub next: u32,
    wear: Wear,
}

/// The segment that is being written.
struct Open {
    segment: Arc<Segment>,
    file: Box<dyn File>,
    /// Of the file.
    pages: usize,
    state: Mutex<OpenState>,
}

struct OpenState {
    /// Of records that are written.
    entries: Vec<Entry>,
    /// Records that room was set aside for.
    reserved: usize,
    next: usize,
    /// Records that are being written.
    writing: usize,
    /// Nothing more is set aside: whoever writes last ends it.
    is_full: bool,
}

/// A record whose segment went, to be written again.
struct Survivor {
    /// With the page where it was.
    entry: Entry,
    from: Place,
    /// When its block was used last.
    used: u32,
    record: Pages,
}

impl Survivor {
    fn fingerprint(&self) -> Fingerprint {
        (&self.entry.key).into()
    }
}

/// Room for a record, which holds its segment open.
struct Room<'a> {
    store: &'a DiskStore,
    open: Arc<Open>,
    page: u32,
}

impl Room<'_> {
    fn written(&self, entry: Entry, about: &About<'_>) {
        let (segment, Entry { key, length, .. }) = (&self.open.segment, entry);
        lock(&self.open.state).entries.push(Entry { page: self.page, ..entry });
        segment.payload.fetch_add(length.into(), Relaxed);
        let now = self.store.uses.pass(record::pages(entry.body()) as u64);
        let held = Held { fingerprint: (&key).into(), page: self.page, used: now.tick };
        lock(&segment.worth).add(held, now);
        let place = Place { segment: segment.number, page: self.page };
        self.store.note_end(held.fingerprint, place, entry.expires_s);
        let lost = self.store.index.insert(held.fingerprint, place, || {
            let is_told = key.group == 0 && !about.tokens.is_empty();
            is_told.then(|| TierEvent::Stored {
                medium: Medium::Disk,
                tenant: about.tenant,
                hash: key.hash,
                parent: about.parent,
                tokens: about.tokens.into(),
            })
        });
        lost.into_iter().for_each(|place| self.store.forget_place(place));
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.open.state);
        state.writing -= 1;
        if state.is_full && state.writing == 0 {
            self.store.seal(&self.open, &mut state);
        }
    }
}

/// Next number, and time.
fn about(page: &[u8]) -> Option<(u32, u64)> {
    let is_valid = &page[..8] == MAGIC && crc32c::crc32c(&page[..16]) == word(page, 16);
    let time = u64::from_le_bytes(page[20..28].try_into().expect("eight bytes"));
    let time = if crc32c::crc32c(&page[..28]) == word(page, 28) { time } else { 0 };
    is_valid.then(|| (word(page, 12), time))
}

fn about_page(next: u32, now_s: u64) -> Pages {
    let mut page = Pages::new(PAGE);
    page[..8].copy_from_slice(MAGIC);
    page[8..12].copy_from_slice(&u32::from(VERSION).to_le_bytes());
    page[12..16].copy_from_slice(&next.to_le_bytes());
    let crc = crc32c::crc32c(&page[..16]);
    page[16..20].copy_from_slice(&crc.to_le_bytes());
    page[20..28].copy_from_slice(&now_s.to_le_bytes());
    let crc = crc32c::crc32c(&page[..28]);
    page[28..32].copy_from_slice(&crc.to_le_bytes());
    page
}

/// A time that has passed, of a directory's file; 0: there is none.
pub(crate) fn time_of(file: &dyn File) -> u64 {
    let mut page = Pages::new(PAGE);
    let read = read_full(file, &mut page, 0).is_ok();
    about(&page).filter(|_| read).map_or(0, |(_, time)| time)
}

impl Writer {
    /// Looks at the directory's files, not into them. The segments come in the order of their numbers, and behind them a time that has passed.
    pub fn open(
        config: &DiskConfig,
        folder: &dyn Folder,
        uses: &UseClock,
    ) -> Result<(Self, Vec<Arc<Segment>>, u64), OpenError> {
        let io = |error| OpenError::Io { dir: config.dir.clone(), error };
        let mut files = folder.list().map_err(io)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let mut wear = Wear::new(config.write_bytes_per_day);
        let mut segments = Vec::new();
        let mut next = 1;
        for file in &files {
            let Some(number) = segment::number(&file.name) else { continue };
            next = next.max(number.saturating_add(1));
            wear.before(file.age, file.bytes);
            let bytes = file.bytes.next_multiple_of(PAGE as u64) + PAGE as u64;
            // As if they had been written one after the other.
            let worth = Worth::new(uses.pass(bytes / PAGE as u64).tick);
            segments.push(Segment::new(number, bytes, Class::default(), worth));
        }
        let mut floor_s = 0;
        if files.iter().any(|file| file.name == ABOUT) {
            let mut page = Pages::new(PAGE);
            folder.open(ABOUT).and_then(|file| read_full(&*file, &mut page, 0)).map_err(io)?;
            // Nothing, after a start that was interrupted: what there is says where to go on.
            if let Some((known, time)) = about(&page) {
                (next, floor_s) = (next.max(known), time);
            }
        } else {
            folder.create(ABOUT, PAGE as u64).map_err(io)?;
        }
        Ok((Self { open: Default::default(), next, wear }, segments, floor_s))
    }
}

impl DiskStore {
    fn wrote(&self, bytes: usize) {
        self.counters.bytes_written.fetch_add(bytes as u64, Relaxed);
    }

    /// `fill` makes the record, in whole pages.
    pub(crate) fn write_block(
        &self,
        entry: Entry,
        about: &About<'_>,
        fill: impl FnOnce(&mut [u8]) -> std::io::Result<()>,
    ) -> Result<(), PutError> {
        let room = self.room(record::pages(entry.body()), about.class)?;
        let mut record = self.buffers.take(record::pages(entry.body()) * PAGE);
        fill(&mut record)?;
        let written = write_full(&*room.open.file, &record, u64::from(room.page) * PAGE as u64);
        let bytes = record.len();
        self.buffers.give_back(record);
        if let Err(error) = written {
            self.turn_off(&error);
            return Err(error.into());
        }
        self.wrote(bytes);
        self.counters.payload_written.fetch_add(entry.length.into(), Relaxed);
        room.written(entry, about);
        Ok(())
    }

    /// Sets room aside.
    fn room(&self, pages: usize, class: Class) -> Result<Room<'_>, PutError> {
        let has_classes =
            self.config.bytes / (self.config.segment_bytes + PAGE as u64) >= SEGMENTS_FOR_CLASSES;
        let class = if has_classes { class } else { Class::default() };
        let mut writer = lock(&self.writer);
        if self.is_off() {
            return Err(PutError::Off);
        }
        let has_room = |open: &Arc<Open>| {
            let state = lock(&open.state);
            state.next + pages + segment::footer_pages(state.reserved + 1) <= open.pages
        };
        let fits = writer.open[class as usize].as_ref().is_some_and(has_room);
        // With its line in the footer; a new segment has three pages more.
        let bytes = pages * PAGE + 64 + if fits { 0 } else { 3 * PAGE };
        if !writer.wear.take(bytes as u64) {
            return Err(PutError::WriteBudget);
        }
        let open = match &writer.open[class as usize] {
            Some(open) if fits => open.clone(),
            _ => self.begin_segment(&mut writer, class, pages)?,
        };
        let mut state = lock(&open.state);
        let page = state.next as u32;
        state.next += pages;
        state.reserved += 1;
        state.writing += 1;
        drop(state);
        Ok(Room { store: self, open, page })
    }

    /// `pages`: of the record that comes first.
    fn begin_segment(&self, writer: &mut Writer, class: Class, pages: usize) -> Result<Arc<Open>, PutError> {
        self.end_segment(writer, class);
        let mut survivors = Vec::new();
        let begun = self.make_room(class, pages, &mut survivors).and_then(|()| {
            let open = self.new_segment(writer, class)?;
            survivors.retain(|survivor| !self.write_again(writer, &open, survivor));
            Ok(open)
        });
        // Those that were not written again went with their segments.
        let is_lost =
            |survivor: &&Survivor| self.index.remove(survivor.fingerprint(), |now| now == survivor.from);
        let lost = survivors.iter().filter(is_lost).count();
        self.counters.reclaimed.fetch_add(lost as u64, Relaxed);
        begun
    }

    /// Room for a segment of a class. What is worth it of those of that class that go for it is in `survivors`.
    fn make_room(&self, class: Class, pages: usize, survivors: &mut Vec<Survivor>) -> Result<(), PutError> {
        let charge = self.config.segment_bytes + PAGE as u64;
        let all = (self.config.segment_bytes / PAGE as u64) as usize;
        let most = all / COPIED_SHARE;
        let mut left = most.min(all.saturating_sub(1 + pages + segment::footer_pages(most + 1)));
        while self.used.load(Relaxed) + charge > self.config.bytes {
            let Some((segment, mean)) = self.take_least() else { return Err(PutError::Full) };
            let first = survivors.len();
            if segment.class.load(Relaxed) == class as u8 {
                self.save(&segment, mean, &mut left, survivors);
            }
            self.delete(&segment, &survivors[first..])?;
        }
        Ok(())
    }

    /// The room is there.
    fn new_segment(&self, writer: &mut Writer, class: Class) -> Result<Arc<Open>, PutError> {
        let charge = self.config.segment_bytes + PAGE as u64;
        let number = writer.next;
        writer.next = number.checked_add(1).ok_or(PutError::Full)?;
        self.used.fetch_add(charge, Relaxed);
        let file = self.create(number, class).inspect_err(|error| {
            self.turn_off(error);
            if self.folder.remove(&segment::name(number)).is_ok() {
                self.used.fetch_sub(charge, Relaxed);
            }
        })?;
        let segment = Segment::new(number, charge, class, Worth::new(self.uses.now().tick));
        self.segments.write().unwrap_or_else(PoisonError::into_inner).insert(number, segment.clone());
        let state = OpenState { entries: Vec::new(), reserved: 0, next: 1, writing: 0, is_full: false };
        let pages = (self.config.segment_bytes / PAGE as u64) as usize;
        let open = Arc::new(Open { segment, file, pages, state: Mutex::new(state) });
        writer.open[class as usize] = Some(open.clone());
        Ok(open)
    }

    /// Reads what of a segment that goes is worth more than `mean`, the most valuable first, up to `left` pages.
    fn save(&self, segment: &Segment, mean: f64, left: &mut usize, survivors: &mut Vec<Survivor>) {
        let above = lock(&segment.worth).above(mean, self.uses.now());
        if above.is_empty() {
            return;
        }
        let Ok(file) = self.folder.open(&segment::name(segment.number)) else { return };
        let mut head = Pages::new(PAGE);
        for held in above {
            let from = Place { segment: segment.number, page: held.page };
            let Ok(read) = read_full(&*file, &mut head, u64::from(held.page) * PAGE as u64) else { return };
            let Parsed::Header(header) = record::parse(&head[..read]) else { continue };
            let record::Header { key, length, lineage, expires_s, .. } = header;
            let entry = Entry { key, page: held.page, length, lineage, expires_s };
            let pages = record::pages(entry.body());
            let is_it = self.index.find(held.fingerprint) == Some(from)
                && Fingerprint::from(&key) == held.fingerprint
                && !self.wall.is_over(expires_s);
            if !is_it || pages > *left {
                continue;
            }
            // What is damaged is not carried on.
            if let Ok(Some(record)) = export::whole(&*file, &entry, &self.config.layout_digest) {
                *left -= pages;
                survivors.push(Survivor { entry, from, used: held.used, record });
            }
        }
    }

    /// Writes a record to a segment that nobody else writes to yet. Its block is found there from then on.
    fn write_again(&self, writer: &mut Writer, open: &Open, survivor: &Survivor) -> bool {
        let Survivor { entry, from, used, record } = survivor;
        // With its line in the footer.
        if self.is_off() || !writer.wear.take(record.len() as u64 + 64) {
            return false;
        }
        let mut state = lock(&open.state);
        let to = Place { segment: open.segment.number, page: state.next as u32 };
        if let Err(error) = write_full(&*open.file, record, u64::from(to.page) * PAGE as u64) {
            self.turn_off(&error);
            return false;
        }
        state.next += record.len() / PAGE;
        state.reserved += 1;
        state.entries.push(Entry { page: to.page, ..*entry });
        drop(state);
        self.wrote(record.len());
        self.counters.bytes_copied.fetch_add(record.len() as u64, Relaxed);
        open.segment.payload.fetch_add(entry.length.into(), Relaxed);
        let (fingerprint, now) = (survivor.fingerprint(), self.uses.now());
        lock(&open.segment.worth).add(Held { fingerprint, page: to.page, used: *used }, now);
        self.note_end(fingerprint, to, entry.expires_s);
        if !self.index.replace(fingerprint, *from, to) {
            self.forget_place(to);
        }
        true
    }

    /// The number is taken before the file is there.
    fn create(&self, number: u32, class: Class) -> std::io::Result<Box<dyn File>> {
        self.write_about(number + 1)?;
        let file = self.folder.create(&segment::name(number), self.config.segment_bytes)?;
        write_full(&*file, &segment::first_page(class), 0)?;
        self.wrote(2 * PAGE);
        Ok(file)
    }

    fn write_about(&self, next: u32) -> std::io::Result<()> {
        write_full(&*self.folder.open(ABOUT)?, &about_page(next, self.wall.now_s()), 0)
    }

    /// The time, in the directory.
    pub(crate) fn note_time(&self, writer: &Writer) {
        match self.write_about(writer.next) {
            Ok(()) => self.wrote(PAGE),
            Err(error) => self.turn_off(&error),
        }
    }

    pub(crate) fn end_segments(&self, writer: &mut Writer) {
        Class::ALL.into_iter().for_each(|class| self.end_segment(writer, class));
    }

    fn end_segment(&self, writer: &mut Writer, class: Class) {
        if let Some(open) = writer.open[class as usize].take() {
            let mut state = lock(&open.state);
            state.is_full = true;
            if state.writing == 0 {
                self.seal(&open, &mut state);
            }
        }
    }

    /// Writes a footer and gives back what the segment did not use.
    fn seal(&self, open: &Open, state: &mut OpenState) {
        let entries = std::mem::take(&mut state.entries);
        lock(&open.segment.worth).end();
        // What brought a write down may do so again. The next start reads the records one by one.
        if std::thread::panicking() {
            return;
        }
        let (layout, end) = (self.config.layout_digest, state.next as u32);
        let contents = Contents { entries, layout, end, ..Contents::default() };
        if let Err(error) = self.write_footer(&open.segment, &*open.file, &contents) {
            self.turn_off(&error);
        }
    }

    fn write_footer(&self, segment: &Segment, file: &dyn File, contents: &Contents) -> std::io::Result<()> {
        let footer = segment::footer(contents);
        let at = u64::from(contents.end) * PAGE as u64;
        let charge = at + (footer.len() + PAGE) as u64;
        let before = segment.bytes.load(Relaxed);
        // Only a file that somebody cut short would grow. It stays without.
        if charge > before {
            return Ok(());
        }
        write_full(file, &footer, at)?;
        self.wrote(footer.len());
        // Only now: a footer that is not at the end of its file is none, and the records are read.
        file.cut(at + footer.len() as u64)?;
        segment.bytes.store(charge, Relaxed);
        self.used.fetch_sub(before - charge, Relaxed);
        Ok(())
    }

    /// The next segment to go, which is out of the table from then on, and what a block of its class is worth on average: one of which nothing
    /// is of use here, or else of the lowest class the one whose blocks are worth the least for what it takes. `None`: none can go just now.
    fn take_least(&self) -> Option<(Arc<Segment>, f64)> {
        let now = self.uses.now();
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let sum = |segment: &Segment| lock(&segment.worth).sum(now);
        // Nobody else has it, and while this lock is held nobody gets it. Whoever reads the directory at the start has what it has not read.
        let may_go =
            |segment: &&Arc<Segment>| Arc::strong_count(segment) == 1 && !segment.is_foreign.load(Relaxed);
        let value = |segment: &Arc<Segment>| {
            let (live, worth) = sum(segment);
            let for_bytes = worth / segment.bytes.load(Relaxed).max(1) as f64;
            (live > 0, segment.class.load(Relaxed), for_bytes, segment.number)
        };
        let least = segments
            .values()
            .filter(may_go)
            .map(value)
            .min_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3)));
        let (_, class, _, number) = least?;
        let of_class = segments.values().filter(|segment| segment.class.load(Relaxed) == class);
        let (live, worth) = of_class
            .map(|segment| sum(segment))
            .fold((0, 0.0), |all, of| (all.0 + u64::from(of.0), all.1 + of.1));
        Some((segments.remove(&number).expect("it was just seen"), worth / live.max(1) as f64))
    }

    /// Of a segment that is out of the table. Those that are written again stay known.
    fn delete(&self, segment: &Segment, survivors: &[Survivor]) -> std::io::Result<()> {
        let here = |place: Place| place.segment == segment.number;
        let survive: FxHashSet<Fingerprint> = survivors.iter().map(Survivor::fingerprint).collect();
        let known: Vec<_> = lock(&segment.worth).blocks().iter().map(|held| held.fingerprint).collect();
        let goes = known.into_iter().filter(|fingerprint| !survive.contains(fingerprint));
        let gone = goes.filter(|fingerprint| self.index.remove(*fingerprint, here)).count();
        self.counters.reclaimed.fetch_add(gone as u64, Relaxed);
        self.forget_ends(segment.number);
        match self.folder.remove(&segment::name(segment.number)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                self.turn_off(&error);
                Err(error)
            }
            _ => {
                self.used.fetch_sub(segment.bytes.load(Relaxed), Relaxed);
                Ok(())
            }
        }
    }

    /// Makes a file of another directory one of this one's, the first to go, and what it holds known. `false`: there is no room.
    pub(crate) fn adopt_segment(&self, from: &Path, file: &Listed) -> std::io::Result<bool> {
        let charge = file.bytes.next_multiple_of(PAGE as u64) + PAGE as u64;
        let mut writer = lock(&self.writer);
        let number = writer.next;
        if self.used.load(Relaxed) + charge > self.config.bytes || number == u32::MAX {
            return Ok(false);
        }
        writer.next = number + 1;
        let moved = self.write_about(number + 1);
        moved.inspect_err(|error| self.turn_off(error))?;
        self.folder.adopt(from, &segment::name(number))?;
        writer.wear.before(file.age, file.bytes);
        self.used.fetch_add(charge, Relaxed);
        let segment = Segment::new(number, charge, Class::default(), Worth::new(1));
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.insert(number, segment.clone());
        drop((segments, writer));
        self.read_segment(&segment, &mut 0);
        Ok(true)
    }

    /// To what the directory may be: it may have been given more before.
    pub(crate) fn shrink(&self) {
        while self.used.load(Relaxed) > self.config.bytes {
            let Some((segment, _)) = self.take_least() else { return };
            if self.delete(&segment, &[]).is_err() {
                return;
            }
        }
    }

    /// Makes known what a file holds that was there at the start. `scanned` counts those without a footer.
    pub(crate) fn read_segment(&self, segment: &Segment, scanned: &mut usize) {
        let name = segment::name(segment.number);
        let read =
            self.folder.open(&name).and_then(|file| Ok((segment::read(&*file, *scanned < TORN)?, file)));
        let (contents, torn) = match read {
            Ok((Found::Footer(contents), _)) => (contents, None),
            Ok((Found::Scanned(contents), file)) => (contents, Some(file)),
            Ok((Found::Foreign, _)) => {
                segment.is_foreign.store(true, Relaxed);
                return;
            }
            // What cannot be read is of no use, and the first to go.
            Err(_) => return,
        };
        let is_ours = contents.layout == self.config.layout_digest;
        if is_ours {
            segment.class.store(contents.class as u8, Relaxed);
            let used = lock(&segment.worth).tick();
            for entry in contents.entries.iter().filter(|entry| !self.wall.is_over(entry.expires_s)) {
                let place = Place { segment: segment.number, page: entry.page };
                let held = Held { fingerprint: (&entry.key).into(), page: entry.page, used };
                lock(&segment.worth).add(held, self.uses.now());
                // Who listens is told when all of it is known.
                let lost = self.index.insert(held.fingerprint, place, || None);
                lost.into_iter().for_each(|place| self.forget_place(place));
                self.note_end(held.fingerprint, place, entry.expires_s);
            }
            lock(&segment.worth).end();
        }
        let payload = contents.entries.iter().map(|entry| u64::from(entry.length)).sum();
        segment.payload.store(payload, Relaxed);
        if let Some(file) = torn {
            *scanned += 1;
            if let Err(error) = self.write_footer(segment, &*file, &contents) {
                self.turn_off(&error);
            }
        }
    }
}
