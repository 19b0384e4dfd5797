//! Values of flags, within their bounds.

pub fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

pub fn share(text: &str) -> Result<f64, String> {
    let share = number::<f64>(text)?;
    if share > 0.0 && share <= 0.95 { Ok(share) } else { Err("must be over 0 and at most 0.95".into()) }
}

pub fn pinned_share(text: &str) -> Result<f64, String> {
    let share = number::<f64>(text)?;
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err("must be from 0 (nothing is pinned) to 1".into())
    }
}

pub fn block_size(text: &str) -> Result<u32, String> {
    let tokens = number::<u32>(text)?;
    if tokens % 8 == 0 && (8..=1024).contains(&tokens) {
        Ok(tokens)
    } else {
        Err("must be a multiple of 8, from 8 to 1024".into())
    }
}

pub fn non_negative(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err("must not be negative".into()) }
}

pub fn positive(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("must be over 0".into()) }
}

pub fn positive_f64(text: &str) -> Result<f64, String> {
    let value = number::<f64>(text)?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("must be over 0".into()) }
}

pub fn probability(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("must be from 0 to 1".into()) }
}

/// How long a model stays after its last request; `None`: until others need its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive(pub Option<std::time::Duration>);

pub fn keep_alive(text: &str) -> Result<KeepAlive, String> {
    folio_server::parse_keep_alive(text).map(KeepAlive)
}
