//! W3C's trace context: whose trace a request is part of.

use axum::http::HeaderMap;

/// Longest `tracestate` that is passed on, in bytes, as W3C recommends; a longer one is left out.
const STATE_MAX: usize = 512;

/// What the caller says in `traceparent` and `tracestate`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: [u8; 16],
    /// The caller's span.
    pub parent: [u8; 8],
    /// The caller records it.
    pub is_sampled: bool,
    pub state: String,
}

impl TraceContext {
    /// `None` where there is none, or one that is damaged: W3C has it ignored then.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all("traceparent").iter();
        let (Some(one), None) = (all.next(), all.next()) else { return None };
        let context = Self::parse(one.to_str().ok()?)?;
        let states: Option<Vec<&str>> =
            headers.get_all("tracestate").iter().map(|state| state.to_str().ok()).collect();
        let state = states.map(|states| states.join(",")).filter(|state| state.len() <= STATE_MAX);
        Some(Self { state: state.unwrap_or_default(), ..context })
    }

    /// `00-<32 hex>-<16 hex>-<2 hex>`; later versions may say more behind that.
    fn parse(text: &str) -> Option<Self> {
        let lower = |text: &str| !text.bytes().any(|byte| byte.is_ascii_uppercase());
        let mut parts = text.splitn(5, '-');
        let (version, trace) = (parts.next()?, parts.next()?);
        let (parent, flags, more) = (parts.next()?, parts.next()?, parts.next());
        let is_known = version.len() == 2 && version != "ff" && hex::decode(version).is_ok();
        if !is_known || !lower(text) || (version == "00" && more.is_some()) || flags.len() != 2 {
            return None;
        }
        let (mut of_trace, mut of_parent, mut of_flags) = ([0; 16], [0; 8], [0; 1]);
        hex::decode_to_slice(trace, &mut of_trace).ok()?;
        hex::decode_to_slice(parent, &mut of_parent).ok()?;
        hex::decode_to_slice(flags, &mut of_flags).ok()?;
        let is_zero = of_trace == [0; 16] || of_parent == [0; 8];
        (!is_zero).then_some(Self {
            trace: of_trace,
            parent: of_parent,
            is_sampled: of_flags[0] & 1 == 1,
            state: String::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_is_what_w3c_says_and_nothing_else() {
        let context = TraceContext::parse(GOOD).expect("a context");
        assert_eq!(
            (hex::encode(context.trace), hex::encode(context.parent)),
            (GOOD[3..35].into(), GOOD[36..52].into())
        );
        assert!(context.is_sampled);
        assert!(!TraceContext::parse(&GOOD.replace("-01", "-00")).expect("one").is_sampled);
        assert!(
            TraceContext::parse(&format!("{}-more", GOOD.replacen("00", "01", 1))).is_some(),
            "a later version"
        );
        for bad in [
            "",
            "00",
            "00--b7ad6b7169203331-01",
            &GOOD[..54],
            &format!("{GOOD}-more"),
            &GOOD.to_uppercase(),
            &GOOD.replacen("00", "ff", 1),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", "00000000000000000000000000000000"),
            &GOOD.replace("b7ad6b7169203331", "0000000000000000"),
            &GOOD.replace("b7ad6b7169203331", "b7ad6b716920333g"),
            &GOOD.replace("-01", "-1"),
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn of_two_parents_none_counts_and_a_long_state_is_left_out() {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", GOOD.parse().expect("a value"));
        headers.append("tracestate", "a=1".parse().expect("a value"));
        headers.append("tracestate", "b=2".parse().expect("a value"));
        assert_eq!(TraceContext::of(&headers).expect("one").state, "a=1,b=2");
        headers.append("tracestate", "x".repeat(513).parse().expect("a value"));
        assert_eq!(TraceContext::of(&headers).expect("one").state, "");
        headers.append("traceparent", GOOD.parse().expect("a value"));
        assert_eq!(TraceContext::of(&headers), None);
    }
}
