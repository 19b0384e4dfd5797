//! RESP on a connection: commands as the client crate writes them, and answers, of which a value is read to where it stays.
//!
//! Owns: what is read. Must never: take more for an answer than was asked for, or go on behind one that was none.
//!
//! Of RESP only what these commands are answered with is read: lines (`+`, `-`, `:`, `_`) and values (`$`). A connection of the client crate
//! collects a value, and copies it when it is whole.

use std::io::{self, ErrorKind};

use redis::{Cmd, RedisError, Value, parse_redis_value};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

/// The longest line, with its end, and what is read ahead.
const LINE_BYTES: usize = 16 << 10;
/// What `read_to_end` wants of room behind the last byte, or it makes the vector larger.
const SPARE_BYTES: usize = 32;

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// See the module documentation. After a fault, or where an answer was not waited for, it is of no use any more.
pub(super) struct Wire(BufReader<Box<dyn Stream>>);

impl Wire {
    pub fn new(stream: impl Stream + 'static) -> Self {
        Self(BufReader::with_capacity(LINE_BYTES, Box::new(stream)))
    }

    /// Asks everything at once. `bytes`: what the values among the answers take at most, together.
    pub async fn ask(&mut self, commands: &[Cmd], bytes: usize) -> Result<Vec<Value>, RedisError> {
        if !self.0.buffer().is_empty() {
            // It came unasked.
            return Err(wrong(false));
        }
        let mut packed = Vec::new();
        commands.iter().for_each(|command| command.write_packed_command(&mut packed));
        self.0.write_all(&packed).await?;
        self.0.flush().await?;
        let (mut answers, mut room) = (Vec::with_capacity(commands.len()), bytes);
        for _ in commands {
            let answer = self.answer(room).await?;
            if let Value::BulkString(value) = &answer {
                room -= value.len();
            }
            answers.push(answer.extract_error()?);
        }
        Ok(answers)
    }

    /// The next answer, which is not a value of more than `room` bytes.
    async fn answer(&mut self, room: usize) -> Result<Value, RedisError> {
        let first = self.0.fill_buf().await?.first().copied();
        if first.is_none_or(|first| !b"+-:_$".contains(&first)) {
            return Err(wrong(first.is_none()));
        }
        let mut line = Vec::new();
        (&mut self.0).take(LINE_BYTES as u64).read_until(b'\n', &mut line).await?;
        if !line.ends_with(b"\r\n") {
            return Err(wrong(line.len() < LINE_BYTES));
        }
        let Some(length) = line.strip_prefix(b"$") else { return parse_redis_value(&line) };
        let length =
            std::str::from_utf8(length).ok().and_then(|length| length.trim_end().parse::<i64>().ok());
        if length == Some(-1) {
            return Ok(Value::Nil);
        }
        let length = length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= room);
        let Some(length) = length else { return Err(wrong(false)) };
        let mut value = Vec::with_capacity(length + 2 + SPARE_BYTES);
        (&mut self.0).take(length as u64 + 2).read_to_end(&mut value).await?;
        if value.len() < length + 2 || !value.ends_with(b"\r\n") {
            return Err(wrong(value.len() < length + 2));
        }
        value.truncate(length);
        Ok(Value::BulkString(value))
    }
}

/// `ended`: in the middle of an answer. Otherwise that is none, or longer than it can be.
fn wrong(ended: bool) -> RedisError {
    match ended {
        true => io::Error::from(ErrorKind::UnexpectedEof).into(),
        false => io::Error::new(ErrorKind::InvalidData, "what it answers is no answer to that").into(),
    }
}
