//! In which order a tier does what it is asked: who waits for it first, then who will, then what is to be kept; and what is cancelled not at all.

mod common;

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::device::{contents, device, load_order, prompt, store_order};
use folio_engine::{LoadOrder, Report, StoreOrder, SystemClock, Tier, TierStats, TransferOrder};
use folio_kv::{BlockHashes, Ticket, TierId};
use folio_tiers::{Carried, Device, Store, StoreTier};

/// Does nothing, one order at a time, each when it is told to.
struct Gate {
    begun: Sender<&'static str>,
    goes_on: Mutex<Receiver<()>>,
}

impl Gate {
    fn pass(&self, what: &'static str) -> Carried {
        let _ = self.begun.send(what);
        let _ = self.goes_on.lock().unwrap().recv_timeout(Duration::from_secs(60));
        Carried::default()
    }
}

impl Store for Gate {
    fn find(&self, _: &Device, _: &BlockHashes, _: u32) -> Vec<Range<u32>> {
        Vec::new()
    }
    fn load(&self, _: &Device, order: &LoadOrder, _: &mut Vec<u8>) -> Carried {
        self.pass(["first", "load", "prefetch", "promoted", "cancelled"][order.ticket.0 as usize])
    }
    fn store(&self, _: &Device, _: &StoreOrder, _: &dyn Fn() -> bool, _: &mut Vec<u8>) -> Carried {
        self.pass("store")
    }
    fn stats(&self) -> TierStats {
        TierStats { name: "gate", ..TierStats::default() }
    }
    fn close(&self) {}
}

#[test]
fn loads_come_before_prefetches_and_those_before_stores() {
    let (begun, orders) = channel();
    let (go, goes_on) = channel();
    let memory = device(16, &[]);
    let gate = Arc::new(Gate { begun, goes_on: Mutex::new(goes_on) });
    let Device { memory: bytes, groups } = &memory;
    let tier = StoreTier::new(gate, bytes.clone(), groups.clone(), 1).expect("a tier");
    let (told, reports) = channel();
    tier.start(Box::new(move |report| told.send(report).unwrap_or(())), Arc::new(SystemClock::new()), None);
    let hashes = prompt(1, 7, 4);
    let contents = contents(&memory, &hashes, 0, 4);
    let load = |ticket: u64, prefetch| LoadOrder {
        ticket: Ticket(ticket),
        prefetch,
        ..load_order(&hashes, contents.clone())
    };
    let next = || orders.recv_timeout(Duration::from_secs(60)).expect("an order");
    let cancel = |ticket| TransferOrder::Cancel { tier: TierId(0), ticket: Ticket(ticket) };
    assert!(tier.order(TransferOrder::Load(load(0, false))));
    assert_eq!(next(), "first");
    assert!(tier.order(TransferOrder::Store(store_order(&hashes, contents.clone()))));
    for order in [load(2, true), load(3, true), load(4, true), load(1, false)] {
        assert!(tier.order(TransferOrder::Load(order)));
    }
    assert!(tier.order(TransferOrder::Promote { tier: TierId(0), ticket: Ticket(3) }));
    assert!(tier.order(cancel(4)));
    assert_eq!(reports.recv_timeout(Duration::from_secs(60)), Ok(Report::Cancelled { ticket: Ticket(4) }));
    // What is begun, or never was, changes nothing.
    assert!([0, 9].into_iter().all(|ticket| tier.order(cancel(ticket))));
    for what in ["load", "promoted", "prefetch", "store"] {
        go.send(()).expect("it waits");
        assert_eq!(next(), what);
    }
    go.send(()).expect("it waits");
    tier.close(Duration::from_secs(60));
    let tickets = reports.try_iter().filter_map(|report| match report {
        Report::Loaded { ticket, .. } => Some(ticket.0),
        Report::Cancelled { ticket } => panic!("{ticket:?} was begun"),
        Report::Read { .. } => None,
    });
    assert_eq!(tickets.collect::<Vec<_>>(), [0, 1, 3, 2]);
}
