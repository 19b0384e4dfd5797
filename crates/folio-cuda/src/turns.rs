//! Two steps that are under way at once, in turns: while one runs, the host writes the words of the other.
//!
//! Owns: what they must not share, which is host memory (the device reads and writes it later than it was asked to), and who is whose
//! turn. On the device everything is in the order of the stream, so there is one of each. Must never: know what the words mean.

use crate::driver::{DevicePtr, Driver, DriverError, EventId, HostId};
use crate::sample::Asked;

type Result<T> = std::result::Result<T, DriverError>;

/// Words that there is room for at first.
const FIRST_WORDS: usize = 1 << 16;

/// One place of words on the device, and one on the host for each turn.
#[derive(Clone, Copy, Default)]
pub(crate) struct Words {
    /// With how many words there is room for.
    hosts: [Option<(HostId, usize)>; 2],
    device: Option<(DevicePtr, usize)>,
}

impl Words {
    /// Makes room for so many, for whoever's turn it is. Whether those on the device lie elsewhere now.
    pub(crate) fn reserve(&mut self, driver: &mut dyn Driver, turn: usize, count: usize) -> Result<bool> {
        let room = count.next_power_of_two().max(FIRST_WORDS);
        let host = &mut self.hosts[turn];
        if host.is_none_or(|(_, has)| has < count) {
            if let Some((old, _)) = host.take() {
                driver.free_host(old)?;
            }
            *host = Some((driver.allocate_host(4 * room as u64)?, room));
        }
        if self.device.is_some_and(|(_, has)| has >= count) {
            return Ok(false);
        }
        if let Some((old, _)) = self.device.take() {
            driver.free(old)?;
        }
        self.device = Some((driver.allocate(4 * room as u64)?, room));
        Ok(true)
    }

    pub(crate) fn device(&self) -> Result<DevicePtr> {
        self.device.map(|(device, _)| device).ok_or_else(nowhere)
    }

    fn host(&self, turn: usize) -> Result<HostId> {
        self.hosts[turn].map(|(host, _)| host).ok_or_else(nowhere)
    }

    /// Sends words that there is room for.
    pub(crate) fn send(&self, driver: &mut dyn Driver, turn: usize, words: &[u32]) -> Result<DevicePtr> {
        let (host, device) = (self.host(turn)?, self.device()?);
        for (place, word) in driver.host(host).as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        driver.upload_async(device, host, 0, 4 * words.len() as u64)?;
        Ok(device)
    }

    /// Has the first `count` words brought back.
    pub(crate) fn fetch(&self, driver: &mut dyn Driver, turn: usize, count: usize) -> Result<()> {
        driver.download_async(self.device()?, self.host(turn)?, 0, 4 * count as u64)
    }

    /// What was fetched, once that was waited for: at least as many words.
    pub(crate) fn fetched(&self, driver: &dyn Driver, turn: usize) -> Result<impl Iterator<Item = u32>> {
        let words = driver.host_bytes(self.host(turn)?).as_chunks().0;
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)))
    }
}

fn nowhere() -> DriverError {
    DriverError::NoKernel("a place for words".to_owned())
}

/// What is known of the step that has a turn.
#[derive(Default)]
pub(crate) struct Turn {
    /// Behind its last operation.
    event: Option<EventId>,
    /// Of its rows.
    pub(crate) asked: Vec<Asked>,
    /// Alternatives that there is room for in each of its results.
    pub(crate) top: u32,
    /// Host memory for the rows of logits that are wanted themselves, and its bytes.
    logits: Option<(HostId, u64)>,
}

impl Turn {
    /// Begins to copy the rows of logits that are wanted themselves, of all that lie at `from`, each of so many bytes.
    pub(crate) fn fetch_logits(
        &mut self,
        driver: &mut dyn Driver,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let wanted = (0..).zip(&self.asked).filter(|(_, row)| row.logits).map(|(index, _): (u64, _)| index);
        let needed = wanted.clone().count() as u64 * bytes;
        if self.logits.is_none_or(|(_, has)| has < needed) && needed > 0 {
            if let Some((old, _)) = self.logits.take() {
                driver.free_host(old)?;
            }
            let room = needed.next_power_of_two();
            self.logits = Some((driver.allocate_host(room)?, room));
        }
        let Some((host, _)) = self.logits else { return Ok(()) };
        for (to, index) in (0..).zip(wanted) {
            driver.download_async(DevicePtr(from.0 + index * bytes), host, to * bytes, bytes)?;
        }
        Ok(())
    }

    /// The bytes of row `row`, if it was fetched, once that was waited for.
    pub(crate) fn logits<'a>(&self, driver: &'a dyn Driver, row: usize, bytes: usize) -> Option<&'a [u8]> {
        let (host, _) = self.logits.filter(|_| self.asked.get(row).is_some_and(|asked| asked.logits))?;
        let before = self.asked[..row].iter().filter(|asked| asked.logits).count();
        driver.host_bytes(host).get(before * bytes..(before + 1) * bytes)
    }

    /// Everything that this step does was asked for.
    pub(crate) fn close(&mut self, driver: &mut dyn Driver) -> Result<()> {
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(driver.event()?),
        };
        driver.record(event)
    }

    /// Waits for the step.
    pub(crate) fn wait(&self, driver: &mut dyn Driver) -> Result<()> {
        self.event.map_or(Ok(()), |event| driver.wait(event))
    }
}

/// The steps that were begun and not finished.
#[derive(Default)]
pub(crate) struct Turns {
    pub(crate) of: [Turn; 2],
    oldest: usize,
    begun: usize,
    finished: usize,
}

impl Turns {
    /// Whose turn a step that begins now has; `None`: two are under way.
    pub(crate) fn next(&self) -> Option<usize> {
        (self.begun < 2).then_some((self.oldest + self.begun) % 2)
    }

    pub(crate) fn none_begun(&self) -> bool {
        self.begun == 0
    }

    /// The step that has the next turn was begun.
    pub(crate) fn begin(&mut self) {
        self.begun += 1;
    }

    /// Takes the oldest step out.
    pub(crate) fn finish(&mut self) -> Option<usize> {
        let turn = (self.begun > 0).then_some(self.oldest)?;
        (self.oldest, self.begun, self.finished) = (1 - turn, self.begun - 1, turn);
        Some(turn)
    }

    /// The step that was finished last.
    pub(crate) fn finished(&self) -> &Turn {
        &self.of[self.finished]
    }
}
