//! Ctrl-C as a flag: it interrupts an answer, not the program. A second one, while the first is not yet served, exits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens on a thread of its own for the rest of the process's life.
    pub fn install() -> Result<Self> {
        let interrupt = Self(Arc::new(AtomicBool::new(false)));
        let flag = interrupt.0.clone();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("signal runtime")?;
        // Installed before returning, so that a Ctrl-C right after is not lost.
        let mut signal = {
            let _inside = runtime.enter();
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())
                .context("signal handler")?
        };
        let listen = move || {
            runtime.block_on(async {
                while signal.recv().await.is_some() {
                    if flag.swap(true, Ordering::Relaxed) {
                        std::process::exit(130);
                    }
                }
            });
        };
        std::thread::Builder::new().name("interrupt".into()).spawn(listen).context("signal thread")?;
        Ok(interrupt)
    }

    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }

    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Forgets an interrupt, before the next answer.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
