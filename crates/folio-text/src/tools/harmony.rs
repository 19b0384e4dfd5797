//! The headers of gpt-oss's messages: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>`.
//!
//! Owns: reading a header. What the messages' text becomes is the machine's business.

pub const START: &str = "<|start|>";
pub const CHANNEL: &str = "<|channel|>";
pub const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
/// What ends a message's text.
pub const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];
pub const MARKERS: &[&str] = &[START, CHANNEL, MESSAGE, CONSTRAIN, ENDS[0], ENDS[1], ENDS[2]];

/// The markers a header can begin with.
pub const BEGINS: &[&str] = &[START, CHANNEL, MESSAGE, CONSTRAIN];
/// Words of a header besides its recipient.
const WORDS: &[&str] = &["assistant", "analysis", "commentary", "final", "json", "code"];

/// Longer headers are text.
const HEADER_MAX: usize = 512;

/// What a message's text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageKind {
    Content,
    Reasoning,
    /// Arguments of this function.
    Arguments(String),
}

/// What is known of a header that `text` begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Header {
    More,
    /// It ends before this byte.
    Message(usize, MessageKind),
    /// There is none.
    Never,
}

/// The header at the start of `text`. `has_function`: whether a bare recipient is one of the request's functions.
pub fn header(text: &str, has_function: impl Fn(&str) -> bool) -> Header {
    let begun = text.trim_start();
    let mut begins = BEGINS.iter().chain(&["to=", "assistant"]);
    if !begins.any(|begin| begun.starts_with(begin) || begin.starts_with(begun)) {
        return Header::Never;
    }
    let Some(end) = text.find(MESSAGE) else {
        let ended = ENDS.iter().any(|end| text.contains(end));
        return if ended || text.len() > HEADER_MAX + MESSAGE.len() { Header::Never } else { Header::More };
    };
    if end > HEADER_MAX || ENDS.iter().any(|marker| text[..end].contains(marker)) {
        return Header::Never;
    }
    match body(&text[..end], has_function) {
        Some(body) => Header::Message(end + MESSAGE.len(), body),
        None => Header::Never,
    }
}

fn body(header: &str, has_function: impl Fn(&str) -> bool) -> Option<MessageKind> {
    let mut spaced = header.to_owned();
    for marker in BEGINS {
        spaced = spaced.replace(marker, " ");
    }
    let mut recipient = None;
    for word in spaced.split_whitespace() {
        match word.strip_prefix("to=") {
            Some(to) if recipient.is_none() => recipient = Some(to.to_owned()),
            None if WORDS.contains(&word) => {}
            // What is no header's word, and a second recipient, is not swallowed.
            _ => return None,
        }
    }
    let channel = header.rsplit_once(CHANNEL).map_or("final", |(_, rest)| rest);
    match recipient {
        Some(recipient) => {
            let function = recipient.strip_prefix("functions.").unwrap_or(&recipient);
            let known = function.len() < recipient.len() || has_function(function);
            let valid = !function.is_empty() && function.bytes().all(super::literal::is_name_byte);
            (known && valid).then(|| MessageKind::Arguments(function.to_owned()))
        }
        None if channel.trim_start().starts_with("analysis") => Some(MessageKind::Reasoning),
        None => Some(MessageKind::Content),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let read = |text: &str| header(text, |name| name == "f");
        let of = |text: &str, body| assert_eq!(read(text), Header::Message(text.len(), body), "{text}");
        of("<|channel|>analysis<|message|>", MessageKind::Reasoning);
        of("<|start|>assistant<|channel|>final<|message|>", MessageKind::Content);
        of("<|channel|>commentary<|message|>", MessageKind::Content);
        of("<|message|>", MessageKind::Content);
        let call = || MessageKind::Arguments("f".into());
        of("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", call());
        of("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>", call());
        of(" to=functions.f<|channel|>commentary<|message|>", call());
        of("<|channel|>analysis to=f code<|message|>", call());
        for never in [
            "Hello",
            "<|channel|>analysis<|end|>",
            "<|channel|>commentary to=browser.search<|message|>",
            "<|start|>assistant to=g<|channel|>commentary to=functions.f<|message|>",
        ] {
            assert_eq!(read(never), Header::Never, "{never}");
        }
        for more in ["", " ", "<|ch", "<|channel|>final", "<|start|>assistant<|chan"] {
            assert_eq!(read(more), Header::More, "{more}");
        }
        assert_eq!(read(&format!("<|channel|>{}", "x".repeat(HEADER_MAX + 20))), Header::Never);
    }
}
