//! `--load-format`: read the weights, or make them up.

use std::fmt;
use std::str::FromStr;

use folio_model::backend::DType;
use folio_model::dummy::ENCODINGS;
use folio_model::quant::Encoding;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// The checkpoint's weights.
    #[default]
    Auto,
    /// Random ones of the shapes that config.json asks for: for measurements.
    Dummy(Encoding),
}

impl FromStr for LoadFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, encoding) = text.split_once(':').unwrap_or((text, "BF16"));
        let known = ENCODINGS.iter().find(|known| known.to_string().eq_ignore_ascii_case(encoding));
        match (kind, known) {
            ("auto", _) if text == kind => Ok(Self::Auto),
            ("dummy", Some(encoding)) => Ok(Self::Dummy(*encoding)),
            _ => {
                let names: Vec<String> = ENCODINGS.iter().map(Encoding::to_string).collect();
                Err(format!(
                    "`{text}` is none of auto, dummy or dummy:TYPE with TYPE of {}",
                    names.join(", ")
                ))
            }
        }
    }
}

impl fmt::Display for LoadFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Dummy(encoding) if *encoding == Encoding::Plain(DType::BF16) => f.write_str("dummy"),
            Self::Dummy(encoding) => write!(f, "dummy:{encoding}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use folio_model::quant::BlockFormat;

    use super::*;

    #[test]
    fn formats_are_written_as_they_are_read() {
        let fp8 = LoadFormat::Dummy(Encoding::Block(BlockFormat::Fp8x128));
        let bf16 = LoadFormat::Dummy(Encoding::Plain(DType::BF16));
        for (text, format) in [("auto", LoadFormat::Auto), ("dummy", bf16), ("dummy:Fp8x128", fp8)] {
            assert_eq!(text.parse(), Ok(format));
            assert_eq!(format.to_string(), text);
        }
        assert_eq!("dummy:bf16".parse(), Ok(bf16));
        for wrong in ["", "random", "dummy:", "dummy:Q2_K", "auto:BF16"] {
            assert!(wrong.parse::<LoadFormat>().is_err(), "{wrong}");
        }
    }
}
