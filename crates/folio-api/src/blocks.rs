//! An answer's pieces as blocks: text, reasoning, calls, in the order in which the model wrote them, for APIs whose answers are lists.
//!
//! Owns: where a block begins and ends. Invariants: one block is open at a time; whitespace alone is no block, unless it is all
//! there is; the blocks do not depend on how the answer was cut into pieces.

use folio_text::OutputEvent;

/// What a block is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Text,
    Thinking,
    Tool { id: String, name: String },
}

/// What happens to the blocks.
#[derive(Debug, PartialEq, Eq)]
pub enum BlockStep {
    Start(BlockKind),
    Text(String),
    Thinking(String),
    Input(String),
    Stop,
}

/// Puts an answer's pieces into blocks.
#[derive(Default)]
pub struct Blocks {
    open: Option<BlockKind>,
    /// Whitespace that a block of this kind may begin with.
    held: Option<(BlockKind, String)>,
    any: bool,
}

impl Blocks {
    pub fn push(&mut self, piece: &OutputEvent, out: &mut Vec<BlockStep>) {
        match piece {
            OutputEvent::Content(text) => self.write(BlockKind::Text, text, out),
            OutputEvent::Reasoning(text) => self.write(BlockKind::Thinking, text, out),
            OutputEvent::CallStarted { id, name, .. } => {
                self.start(BlockKind::Tool { id: id.clone(), name: name.clone() }, out);
            }
            OutputEvent::Arguments { text, .. } => out.push(BlockStep::Input(text.clone())),
            OutputEvent::CallEnded { .. } => {}
        }
    }

    /// The answer is over.
    pub fn finish(&mut self, out: &mut Vec<BlockStep>) {
        if let Some((BlockKind::Text, text)) = self.held.take().filter(|_| !self.any) {
            self.start(BlockKind::Text, out);
            self.add(&text, out);
        }
        self.stop(out);
    }

    fn write(&mut self, kind: BlockKind, text: &str, out: &mut Vec<BlockStep>) {
        if self.open.as_ref() == Some(&kind) {
            return self.add(text, out);
        }
        let mut lead = match self.held.take() {
            Some((held, lead)) if held == kind => lead,
            _ => String::new(),
        };
        lead.push_str(text);
        if lead.trim().is_empty() {
            self.held = Some((kind, lead));
            return;
        }
        // Between blocks it is a separator.
        let begins = if self.any { lead.trim_start() } else { &lead };
        self.start(kind, out);
        self.add(begins, out);
    }

    fn add(&mut self, text: &str, out: &mut Vec<BlockStep>) {
        out.push(match self.open {
            Some(BlockKind::Thinking) => BlockStep::Thinking(text.to_owned()),
            _ => BlockStep::Text(text.to_owned()),
        });
    }

    fn start(&mut self, kind: BlockKind, out: &mut Vec<BlockStep>) {
        self.stop(out);
        self.held = None;
        self.any = true;
        out.push(BlockStep::Start(kind.clone()));
        self.open = Some(kind);
    }

    fn stop(&mut self, out: &mut Vec<BlockStep>) {
        if self.open.take().is_some() {
            out.push(BlockStep::Stop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(pieces: &[OutputEvent]) -> Vec<BlockStep> {
        let (mut blocks, mut out) = (Blocks::default(), Vec::new());
        pieces.iter().for_each(|piece| blocks.push(piece, &mut out));
        blocks.finish(&mut out);
        out
    }

    fn text(text: &str) -> OutputEvent {
        OutputEvent::Content(text.into())
    }

    #[test]
    fn whitespace_between_blocks_is_none() {
        let call = OutputEvent::CallStarted { index: 0, id: "call_1".into(), name: "f".into() };
        let tool = BlockKind::Tool { id: "call_1".into(), name: "f".into() };
        let said = BlockStep::Text("hi".into());
        let got = steps(&[text("\n"), call.clone(), text("\n"), text("\nhi")]);
        assert_eq!(
            got,
            [
                BlockStep::Start(tool),
                BlockStep::Stop,
                BlockStep::Start(BlockKind::Text),
                said,
                BlockStep::Stop
            ]
        );
        // All there is, and the beginning of an answer, stay as they are.
        assert_eq!(
            steps(&[text(" ")]),
            [BlockStep::Start(BlockKind::Text), BlockStep::Text(" ".into()), BlockStep::Stop]
        );
        let got = steps(&[text(" "), text("a")]);
        assert_eq!(got, [BlockStep::Start(BlockKind::Text), BlockStep::Text(" a".into()), BlockStep::Stop]);
        assert_eq!(steps(&[]), []);
    }
}
