//! A rendered conversation: the text that the model reads, and where nothing in it may be read as structure.
//!
//! Invariant: what a client wrote (contents, names, arguments, tools, documents, variables) never becomes a marker of the
//! model's, an added token such as `<|im_start|>`: each marker in it has a *break*, and [`Tokenizer::encode_prompt`] finds
//! no token across one. A text without breaks is tokenized as any other.
//!
//! [`Tokenizer::encode_prompt`]: crate::Tokenizer::encode_prompt

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Places in `text`, ascending.
    breaks: Vec<usize>,
    before_answer: usize,
}

impl Prompt {
    /// `text` with `seam` taken out of it; each one is a break.
    pub(crate) fn new(text: String, before_answer: usize, seam: Option<char>) -> Self {
        let Some(seam) = seam.filter(|seam| text.contains(*seam)) else {
            return Self { text, breaks: Vec::new(), before_answer };
        };
        let seams = text[..before_answer].matches(seam).count();
        let mut prompt = Self {
            text: String::with_capacity(text.len()),
            breaks: Vec::new(),
            before_answer: before_answer - seams * seam.len_utf8(),
        };
        let mut pieces = text.split(seam);
        prompt.text.push_str(pieces.next().unwrap_or_default());
        for piece in pieces {
            if prompt.breaks.last() != Some(&prompt.text.len()) {
                prompt.breaks.push(prompt.text.len());
            }
            prompt.text.push_str(piece);
        }
        prompt
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn into_text(self) -> String {
        self.text
    }

    pub fn breaks(&self) -> &[usize] {
        &self.breaks
    }

    /// Bytes, from the beginning, that would be the same if the assistant's turn were not begun: at least those that the template wrote before it
    /// asked.
    pub fn before_answer(&self) -> usize {
        self.before_answer
    }

    /// Goes on with something of our own, in which markers count.
    pub fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Only the first `bytes`, which end between two characters.
    pub fn truncate(&mut self, bytes: usize) {
        self.text.truncate(bytes);
        self.before_answer = self.before_answer.min(bytes);
        self.breaks.retain(|at| *at <= bytes);
    }

    /// As far as the other one says the same.
    pub fn shared(&self, other: &Self) -> Self {
        let same = self.text.bytes().zip(other.text.bytes()).take_while(|(a, b)| a == b).count();
        let mut shared = self.clone();
        shared.truncate(self.text.floor_char_boundary(same));
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seams_become_breaks() {
        let prompt = Prompt::new("a|b||c|".into(), 5, Some('|'));
        assert_eq!((prompt.text(), prompt.breaks()), ("abc", &[1, 2, 3][..]));
        assert_eq!(prompt.before_answer(), 2);
        assert_eq!(Prompt::new("a|b".into(), 3, None).text(), "a|b");
        let mut cut = prompt.clone();
        cut.truncate(1);
        assert_eq!((cut.text(), cut.breaks(), cut.before_answer()), ("a", &[1][..], 1));
        assert_eq!(prompt.shared(&Prompt::new("abd".into(), 3, None)).breaks(), [1, 2]);
    }
}
