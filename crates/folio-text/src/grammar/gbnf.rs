//! llama.cpp's grammar notation (GBNF), rewritten as Lark.
//!
//! Owns: reading `name ::= alternatives` with literals, classes, groups and repetitions. Must never: build a parser; what a
//! grammar means is decided by whoever reads the Lark text.
//!
//! Names are numbered, so that none can collide with a word of Lark's; `root` is the start. Linear in the text, and groups may
//! be [`DEPTH_MAX`] deep.

use std::collections::HashMap;
use std::fmt::Write;

use super::DEPTH_MAX;

/// Whether a text is GBNF rather than Lark.
pub(super) fn looks_like(text: &str) -> bool {
    text.contains("::=")
}

#[derive(Debug, PartialEq)]
enum Token {
    Name(String),
    /// `::=`
    Is,
    /// Ready for Lark.
    Atom(String),
    /// `|`, `(`, `)` or a repetition, the same in Lark.
    Mark(String),
}

/// The grammar in Lark's notation. Errors name the line.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let tokens = tokens(text)?;
    let mut rules: HashMap<&str, usize> = HashMap::new();
    for (index, (token, _)) in tokens.iter().enumerate() {
        if let (Token::Name(name), Some((Token::Is, line))) = (token, tokens.get(index + 1)) {
            let number = rules.len();
            if rules.insert(name, number).is_some() {
                return Err(format!("line {line}: the rule '{name}' is defined twice"));
            }
        }
    }
    if !rules.contains_key("root") {
        return Err("there is no rule named 'root'".into());
    }
    let named = |name: &str| match (name, rules.get(name)) {
        ("root", _) => Some("start".to_owned()),
        (_, Some(number)) => Some(format!("rule{number}")),
        _ => None,
    };
    let mut out = String::new();
    let (mut depth, mut vacant) = (0usize, false);
    let mut index = 0;
    while let Some((token, line)) = tokens.get(index) {
        let fault = |what: &str| Err(format!("line {line}: {what}"));
        match token {
            Token::Name(name) if matches!(tokens.get(index + 1), Some((Token::Is, _))) => {
                if depth > 0 {
                    return fault("a group is not closed before the next rule");
                }
                close(&mut out, vacant);
                write!(out, "{}{}:", if out.is_empty() { "" } else { "\n" }, named(name).unwrap_or_default())
                    .unwrap_or_default();
                (vacant, index) = (true, index + 1);
            }
            Token::Is => return fault("'::=' without a name before it"),
            _ if out.is_empty() => return fault("a grammar begins with 'name ::='"),
            Token::Name(name) => {
                let Some(name) = named(name) else {
                    return fault(&format!("there is no rule named '{name}'"));
                };
                write!(out, " {name}").unwrap_or_default();
                vacant = false;
            }
            Token::Atom(atom) => {
                write!(out, " {atom}").unwrap_or_default();
                vacant = false;
            }
            Token::Mark(mark) => match mark.as_str() {
                "|" => {
                    close(&mut out, vacant);
                    out.push_str(" |");
                    vacant = true;
                }
                "(" => {
                    depth += 1;
                    if depth > DEPTH_MAX {
                        return fault("groups are nested too deeply");
                    }
                    out.push_str(" (");
                    vacant = true;
                }
                ")" => {
                    if depth == 0 {
                        return fault("')' without '('");
                    }
                    depth -= 1;
                    close(&mut out, vacant);
                    out.push(')');
                    vacant = false;
                }
                repetition if vacant => return fault(&format!("'{repetition}' follows nothing")),
                repetition => out.push_str(repetition),
            },
        }
        index += 1;
    }
    if depth > 0 {
        return Err("a group is not closed".into());
    }
    close(&mut out, vacant);
    out.push('\n');
    Ok(out)
}

/// An alternative without anything in it is the empty text.
fn close(out: &mut String, vacant: bool) {
    if vacant {
        out.push_str(" \"\"");
    }
}

/// Tokens with the line each is in.
fn tokens(text: &str) -> Result<Vec<(Token, usize)>, String> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let mut rest = line.chars().peekable();
        while let Some(first) = rest.next() {
            let token = match first {
                ' ' | '\t' | '\r' => continue,
                '#' => break,
                ':' => {
                    if (rest.next(), rest.next()) != (Some(':'), Some('=')) {
                        return Err(format!("line {number}: expected '::='"));
                    }
                    Token::Is
                }
                '|' | '(' | ')' | '*' | '+' | '?' => Token::Mark(first.into()),
                '{' => {
                    let inside: String =
                        rest.by_ref().take_while(|c| *c != '}').filter(|c| !c.is_whitespace()).collect();
                    let digits = |part: &str| part.len() <= 6 && part.bytes().all(|b| b.is_ascii_digit());
                    let (least, most) = inside.split_once(',').unwrap_or((&inside, "0"));
                    if least.is_empty() || !digits(least) || !digits(most) {
                        return Err(format!("line {number}: '{{{inside}}}' is no number of times"));
                    }
                    Token::Mark(format!("{{{inside}}}"))
                }
                '.' => Token::Atom("/(?s:.)/".into()),
                '"' => {
                    let mut literal = String::new();
                    loop {
                        match character(&mut rest, '"') {
                            Ok(Some(c)) => literal.push(c),
                            Ok(None) => break,
                            Err(what) => return Err(format!("line {number}: {what} in a literal")),
                        }
                    }
                    Token::Atom(serde_json::Value::String(literal).to_string())
                }
                '[' => Token::Atom(
                    class(&mut rest).map_err(|what| format!("line {number}: {what} in a character class"))?,
                ),
                c if c.is_alphanumeric() || c == '_' || c == '-' => {
                    let mut name = String::from(c);
                    while let Some(c) = rest.next_if(|c| c.is_alphanumeric() || matches!(c, '_' | '-')) {
                        name.push(c);
                    }
                    Token::Name(name)
                }
                other => return Err(format!("line {number}: unexpected '{other}'")),
            };
            found.push((token, number));
        }
    }
    Ok(found)
}

type Characters<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// The next character of a literal or class, escapes resolved; `None` at its `end`.
fn character(rest: &mut Characters<'_>, end: char) -> Result<Option<char>, String> {
    let first = rest.next().ok_or_else(|| format!("a '{end}' is missing"))?;
    if first == end {
        return Ok(None);
    }
    if first != '\\' {
        return Ok(Some(first));
    }
    let escape = rest.next().ok_or("an escape is not finished")?;
    let digits = match escape {
        'n' => return Ok(Some('\n')),
        'r' => return Ok(Some('\r')),
        't' => return Ok(Some('\t')),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        '"' | '\\' | '[' | ']' | '-' | '^' | '/' => return Ok(Some(escape)),
        other => return Err(format!("unknown escape '\\{other}'")),
    };
    let number: String = rest.by_ref().take(digits).collect();
    let code = (number.len() == digits).then(|| u32::from_str_radix(&number, 16).ok()).flatten();
    let c = code.and_then(char::from_u32).ok_or_else(|| format!("'\\{escape}{number}' is no character"))?;
    Ok(Some(c))
}

/// A character class as a regular expression, every character by its number.
fn class(rest: &mut Characters<'_>) -> Result<String, String> {
    let negated = rest.next_if_eq(&'^').is_some();
    let mut out = String::from(if negated { "/[^" } else { "/[" });
    let code = |c: char| format!("\\x{{{:x}}}", c as u32);
    let mut empty = true;
    while let Some(first) = character(rest, ']')? {
        empty = false;
        out.push_str(&code(first));
        let mut ahead = rest.clone();
        if ahead.next() == Some('-') && ahead.peek().is_some_and(|c| *c != ']') {
            rest.next();
            let last = character(rest, ']')?.ok_or("a range is not finished")?;
            if last < first {
                return Err(format!("the range '{first}-{last}' is empty"));
            }
            out.push('-');
            out.push_str(&code(last));
        }
    }
    if empty {
        return Err("nothing is".into());
    }
    out.push_str("]/");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewrites_what_the_notation_has() {
        let lark = to_lark(
            "# a list\nroot ::= \"[\" ws item-x (\",\" item-x)* \"]\" |\n  # nothing\n\nitem-x ::= [a-z\\]^\\x41-] {2,3} ws\nws ::= (\" \" | \"\\n\")? .\n",
        );
        assert_eq!(
            lark.as_deref(),
            Ok(
                "start: \"[\" rule2 rule1 ( \",\" rule1)* \"]\" | \"\"\nrule1: /[\\x{61}-\\x{7a}\\x{5d}\\x{5e}\\x{41}\\x{2d}]/{2,3} rule2\nrule2: ( \" \" | \"\\n\")? /(?s:.)/\n"
            )
        );
    }

    #[test]
    fn faults_name_the_line_and_the_fault() {
        for (text, expected) in [
            ("a ::= \"x\"", "no rule named 'root'"),
            ("root ::= b", "line 1: there is no rule named 'b'"),
            ("root ::= \"x\"\nroot ::= \"y\"", "line 2: the rule 'root' is defined twice"),
            ("root ::= (\"x\"", "a group is not closed"),
            ("root ::= \"x\")", "line 1: ')' without '('"),
            ("root ::= *", "line 1: '*' follows nothing"),
            ("root ::= \"x", "a '\"' is missing in a literal"),
            ("root ::= [a", "a ']' is missing in a character class"),
            ("root ::= [z-a]", "the range 'z-a' is empty"),
            ("root ::= \"\\q\"", "unknown escape '\\q'"),
            ("\"x\" root ::= \"x\"", "begins with 'name ::='"),
            ("root ::= \"x\"{a}", "'{a}' is no number of times"),
            ("root ::= %", "unexpected '%'"),
        ] {
            let error = to_lark(text).expect_err(text);
            assert!(error.contains(expected), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn deep_groups_are_refused() {
        let deep = format!("root ::= {}\"x\"{}", "(".repeat(5000), ")".repeat(5000));
        assert!(to_lark(&deep).expect_err("too deep").contains("too deeply"));
    }
}
