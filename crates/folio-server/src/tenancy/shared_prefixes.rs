//! Prefixes that an operator declares to be shared by everybody: read at start, computed for nobody in particular, found by every
//! tenant whose prompt begins with them.
//!
//! Owns: which of them a prompt begins with, and computing them. Must never: let a request say what is shared.
//!
//! A declared prefix has a tenant of its own, with a secret nobody else's hashes are keyed with and no key to authenticate by. Its
//! blocks are computed by a request of this tenant and pinned. A prompt that begins with at least one of its blocks gets a root
//! that reads them ([`Root::below`]); everything behind hangs on a root of the asking tenant's own, so two tenants that continue
//! the same declared prefix have nothing in common but that. Compared are whole blocks of tokens: text may be cut into
//! tokens otherwise where something follows it.
//!
//! Where the blocks cannot be pinned (sliding windows, quotas, the limit of pins) they are kept by the highest priority, and
//! computed again when a request missed them. Until they are there, everybody computes them for themselves, as without.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use folio_api::ApiError;
use folio_engine::request::{EventSink, RetentionRange};
use folio_engine::{Event, Request, SamplingParams};
use folio_kv::{OPERATOR_PRIORITY, Root};
use tokio::sync::mpsc;

use crate::engine::{self, Served};
use crate::error::ServerError;
use crate::tenancy::declared::DeclaredPrefix;

/// One declared prefix.
pub(crate) struct SharedPrefix {
    name: String,
    root: Root,
    tokens: Arc<[u32]>,
    /// A request that computes it is on its way.
    computing: AtomicBool,
}

#[derive(Default)]
pub(crate) struct SharedPrefixes {
    list: Vec<Arc<SharedPrefix>>,
    block_tokens: u32,
}

impl SharedPrefixes {
    /// Of what was declared: its root, and its tokens. A mistake is named with its prefix.
    pub fn new<'a>(
        declared: impl Iterator<Item = (&'a DeclaredPrefix, Root, Result<Vec<u32>, ApiError>)>,
        block_tokens: u32,
    ) -> Result<Self, ServerError> {
        let block_tokens = block_tokens.max(1);
        let list = declared.map(|(prefix, root, tokens)| {
            let wrong = |what: String| {
                ServerError::Config(format!("the tenants file: prefix {:?}: {what}", prefix.name))
            };
            let tokens = tokens.map_err(|error| wrong(error.message))?;
            if (tokens.len() as u32) < block_tokens {
                let count = tokens.len();
                return Err(wrong(format!("it has {count} tokens, less than a block of {block_tokens}")));
            }
            let (name, tokens) = (prefix.name.clone(), tokens.into());
            Ok(Arc::new(SharedPrefix { name, root, tokens, computing: AtomicBool::new(false) }))
        });
        Ok(Self { list: list.collect::<Result<_, _>>()?, block_tokens })
    }

    /// The prefix that `tokens` begin with for the most whole blocks, and these blocks.
    fn longest(&self, tokens: &[u32]) -> Option<(&Arc<SharedPrefix>, u32)> {
        // One token is always left to compute.
        let tokens = &tokens[..tokens.len().saturating_sub(1)];
        let blocks = |prefix: &SharedPrefix| {
            let common = prefix.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            common as u32 / self.block_tokens
        };
        let found = self.list.iter().map(|prefix| (prefix, blocks(prefix)));
        // The first of equals.
        found.filter(|(_, blocks)| *blocks > 0).rev().max_by_key(|(_, blocks)| *blocks)
    }

    /// Where a prompt's chains begin; `own`: the tenant's root.
    pub fn root(&self, own: Root, tokens: &[u32]) -> Root {
        match self.longest(tokens) {
            Some((prefix, blocks)) => {
                let shared = &tokens[..(blocks * self.block_tokens) as usize];
                own.below(&prefix.root, shared, self.block_tokens)
            }
            None => own,
        }
    }

    /// A prompt found `cached` of its tokens: if that is less than it shares, the rest is computed again, for those to come.
    pub fn served(&self, served: &Arc<Served>, tokens: &[u32], cached: u32) {
        let missed = |blocks: u32| cached < blocks * self.block_tokens;
        if let Some((prefix, _)) = self.longest(tokens).filter(|(_, blocks)| missed(*blocks)) {
            tokio::spawn(prefix.clone().compute(served.clone()));
        }
    }

    /// Computes all of them, one after the other.
    pub async fn compute(&self, served: &Arc<Served>) {
        for prefix in &self.list {
            prefix.clone().compute(served.clone()).await;
        }
    }
}

impl SharedPrefix {
    /// Computes what is missing and pins all of it, unless somebody is just doing so.
    async fn compute(self: Arc<Self>, served: Arc<Served>) {
        if self.computing.swap(true, Ordering::AcqRel) {
            return;
        }
        let id = served.engine.next_request_id();
        let sampling = SamplingParams::greedy(0);
        let request = Request {
            retention: vec![RetentionRange {
                tokens: 0..self.tokens.len() as u32,
                priority: OPERATOR_PRIORITY,
                ttl_us: None,
                pin: true,
            }],
            ..Request::new(id, self.root.tenant, self.root, self.tokens.clone(), sampling)
        };
        let (sender, mut events) = mpsc::unbounded_channel();
        let sink: Box<dyn EventSink> = Box::new(move |event: Event| sender.send(event).is_ok());
        let name = self.name.as_str();
        match engine::submit(&served, request, sink).await {
            // Kept while the events are awaited: a flag that is dropped cancels nothing.
            Ok(_flag) => {
                while let Some(event) = events.recv().await {
                    match event {
                        Event::Prompt { kept: Some(kept), .. } => {
                            if let Err(reason) = *kept {
                                tracing::info!(prefix = name, %reason, "kept by priority, not pinned");
                            }
                        }
                        Event::Finished { error: Some(error), .. } => {
                            tracing::warn!(prefix = name, %error, "the shared prefix was not computed");
                        }
                        _ => {}
                    }
                }
            }
            Err(reason) => tracing::warn!(prefix = name, %reason, "the shared prefix was not computed"),
        }
        self.computing.store(false, Ordering::Release);
    }
}
