//! `multipart/form-data`, as an uploaded file arrives (RFC 7578), read from a whole body.
//!
//! Owns: finding the fields. Must never: copy one, or take what is cut short for whole. Why not `multer`: it bounds neither the fields
//! nor the bytes of a field's head, and copies the body that is here already.

use folio_text::work;
use memchr::memmem;

/// One field of a form.
#[derive(Debug, PartialEq)]
pub struct FormField<'a> {
    pub name: String,
    pub filename: Option<String>,
    pub content: &'a [u8],
}

const PARTS_MAX: usize = 32;
const HEAD_BYTES_MAX: usize = 8 << 10;

/// The boundary that a `content-type` header names.
pub fn boundary(content_type: &str) -> Option<String> {
    let (essence, parameters) = content_type.split_once(';')?;
    if !essence.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = parameter(parameters, "boundary")?;
    (1..=70).contains(&value.len()).then_some(value)
}

/// All fields, in order. The error says what is wrong with the form.
pub fn parts<'a>(body: &'a [u8], boundary: &str) -> Result<Vec<FormField<'a>>, String> {
    let first = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let mut rest = body.strip_prefix(first.as_bytes()).ok_or("the form does not begin with its boundary")?;
    let mut parts = Vec::new();
    loop {
        if rest.starts_with(b"--") {
            return Ok(parts);
        }
        rest = rest.strip_prefix(b"\r\n").ok_or("a boundary is not followed by a line's end")?;
        if parts.len() == PARTS_MAX {
            return Err(format!("the form has more than {PARTS_MAX} fields"));
        }
        let head_end =
            find(&rest[..rest.len().min(HEAD_BYTES_MAX)], b"\r\n\r\n").ok_or("a field has no content")?;
        let (head, content) = (&rest[..head_end], &rest[head_end + 4..]);
        let end = find(content, delimiter.as_bytes()).ok_or("the form is cut short")?;
        parts.push(part(head, &content[..end])?);
        rest = &content[end + delimiter.len()..];
    }
}

fn part<'a>(head: &[u8], content: &'a [u8]) -> Result<FormField<'a>, String> {
    let head = std::str::from_utf8(head).map_err(|_| "a field's head is not UTF-8")?;
    let disposition = head.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let (kind, parameters) =
        disposition.and_then(|value| value.split_once(';')).ok_or("a field has no name")?;
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return Err("a field is no form-data".into());
    }
    let name = parameter(parameters, "name").ok_or("a field has no name")?;
    Ok(FormField { name, filename: parameter(parameters, "filename"), content })
}

/// `name=value` or `name="value"` among parameters that are separated by semicolons.
fn parameter(mut text: &str, wanted: &str) -> Option<String> {
    loop {
        text = text.trim_start_matches([';', ' ', '\t']);
        let (name, rest) = text.split_once('=')?;
        let (value, rest) = match rest.strip_prefix('"') {
            None => {
                let end = rest.find(';').unwrap_or(rest.len());
                (rest[..end].trim().to_owned(), &rest[end..])
            }
            Some(quoted) => {
                let (mut value, mut escaped, mut end) = (String::new(), false, None);
                for (at, c) in quoted.char_indices() {
                    match c {
                        '"' if !escaped => {
                            end = Some(at);
                            break;
                        }
                        '\\' if !escaped => escaped = true,
                        c => {
                            escaped = false;
                            value.push(c);
                        }
                    }
                }
                (value, &quoted[end? + 1..])
            }
        };
        work::add(text.len() - rest.len());
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        text = rest;
    }
}

/// First occurrence.
fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    let found = memmem::find(text, wanted);
    work::add(found.unwrap_or(text.len()));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_files_are_found() {
        let header = "multipart/form-data; charset=utf-8; boundary=\"x-1\"";
        assert_eq!(boundary(header).as_deref(), Some("x-1"));
        assert_eq!(boundary("application/json"), None);
        let body = b"--x-1\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x-1\r\n\
            content-type: text/plain\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a \\\"b\\\";c.jsonl\"\r\n\r\n\
            {}\r\n--x-\r\n\r\n--x-1--\r\n";
        let parts = parts(body, "x-1").unwrap();
        assert_eq!(parts[0], FormField { name: "purpose".into(), filename: None, content: b"batch" });
        assert_eq!(parts[1].filename.as_deref(), Some("a \"b\";c.jsonl"));
        assert_eq!(parts[1].content, b"{}\r\n--x-\r\n");
    }

    #[test]
    fn what_is_cut_short_or_no_form_is_refused() {
        let whole = b"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nvalue\r\n--b--".as_slice();
        assert_eq!(parts(whole, "b").unwrap().len(), 1);
        for end in 0..whole.len() {
            assert!(parts(&whole[..end], "b").is_err(), "{end} bytes");
        }
        for wrong in [
            "",
            "--b--x",
            "--b\r\n\r\n\r\nvalue\r\n--b--",
            "--b\r\nContent-Disposition: x; name=a\r\n\r\n\r\n--b--",
        ] {
            let found = parts(wrong.as_bytes(), "b");
            assert!(found.is_err() || found == Ok(vec![]), "{wrong:?}: {found:?}");
        }
    }

    /// Whatever bytes a file has, they come out as they went in; and no bytes at all bring the reader down.
    #[test]
    fn any_bytes_are_a_content_and_any_bytes_may_be_sent() {
        let mut state = 7u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        // Of these a form is made, so that they come near to being one.
        let pieces: [&[u8]; 8] =
            [b"--", b"b", b"\r\n", b"\r\n\r\n", b"\"", b"\r", b"x", b"Content-Disposition: form-data; name="];
        for _ in 0..3000 {
            let content: Vec<u8> =
                (0..next() % 12).flat_map(|_| pieces[next() as usize % 8].to_vec()).collect();
            let _ = parts(&content, "b");
            if find(&content, b"\r\n--boundary").is_some() {
                continue;
            }
            let head = b"--boundary\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
            let form = [head.as_slice(), &content, b"\r\n--boundary--\r\n"].concat();
            assert_eq!(parts(&form, "boundary").unwrap()[0].content, content);
        }
    }
}
