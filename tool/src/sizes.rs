//! Numbers as users write them: sizes (`8`, `4K`, `1M`) and their ranges, counts (`100K`, `1e6`)
//! and times (`90s`, `5m`).
//!
//! Suffixes of sizes are binary (1K = 1024 bytes) and may be written out (`KiB`, `KB`).

use std::time::Duration;

/// Parses a size in bytes. Zero is allowed; callers that need at least one byte check that.
pub fn parse(text: &str) -> Result<usize, String> {
    const SUFFIXES: [(&str, u64); 10] = [
        ("b", 1),
        ("k", 1 << 10),
        ("kb", 1 << 10),
        ("kib", 1 << 10),
        ("m", 1 << 20),
        ("mb", 1 << 20),
        ("mib", 1 << 20),
        ("g", 1 << 30),
        ("gb", 1 << 30),
        ("gib", 1 << 30),
    ];
    let bytes = number(text, &SUFFIXES).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| {
        format!("`{text}` is not a size: write whole bytes, or a number with K, M or G, such as 64K")
    })
}

/// Parses a count, with K, M or G for powers of 1000.
pub fn parse_count(text: &str) -> Result<u64, String> {
    number(text, &[("k", 1000), ("m", 1_000_000), ("g", 1_000_000_000)])
        .ok_or_else(|| format!("`{text}` is not a count: write a whole number, such as 100000, 100K or 1e6"))
}

/// Parses a time in whole seconds: `90`, `90s`, `5m` or `1h`.
pub fn parse_time(text: &str) -> Result<u64, String> {
    number(text, &[("s", 1), ("m", 60), ("h", 3600)])
        .ok_or_else(|| format!("`{text}` is not a time: write whole seconds, such as 90, 90s, 5m or 1h"))
}

/// Parses a whole number, with an optional exponent (`1e6`) or one of these suffixes, in either
/// case.
pub fn number(text: &str, suffixes: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(digits);
    let exponent = || 10u64.checked_pow(rest.strip_prefix('e')?.parse().ok()?);
    let scale = match suffixes.iter().find(|(suffix, _)| *suffix == rest) {
        Some(&(_, scale)) => scale,
        None if rest.is_empty() => 1,
        None => exponent()?,
    };
    number.parse::<u64>().ok()?.checked_mul(scale)
}

/// Returns `begin`, `begin * factor`, ... up to `end`, which is included if a step reaches it.
pub fn range(begin: usize, end: usize, factor: usize) -> Result<Vec<usize>, String> {
    if factor < 2 {
        return Err(format!("-f {factor}: the factor between sizes must be at least 2"));
    }
    if begin > end {
        return Err(format!("-b {} is above -e {}", show(begin), show(end)));
    }
    let mut sizes = Vec::new();
    let mut size = begin;
    while size <= end {
        sizes.push(size);
        match size.checked_mul(factor) {
            Some(next) if size != 0 => size = next,
            _ => break,
        }
    }
    Ok(sizes)
}

/// Formats a size in the largest unit that divides it, as [`parse`] reads it.
pub fn show(bytes: usize) -> String {
    match bytes {
        0 => "0".into(),
        b if b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

/// Parses a time from a millisecond to a day: seconds, which may have a fraction, or with a suffix.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    let whole = number(text, &[("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)]);
    let suffixed = text.ends_with(|c: char| c.is_ascii_alphabetic());
    let seconds = match (whole, suffixed) {
        (Some(ms), true) => ms as f64 / 1000.0,
        _ => text.parse().unwrap_or(f64::NAN),
    };
    match (0.001..=86_400.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(format!(
            "`{text}` is not a time from 1ms to 24h: write seconds, or a time such as 500ms, 5s or 1m"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_suffixes() {
        for (text, bytes) in [
            ("8", 8),
            ("4K", 4096),
            ("4k", 4096),
            ("1MiB", 1 << 20),
            ("2g", 2 << 30),
            ("0", 0),
            ("7b", 7),
            ("1e3", 1000),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_named() {
        for text in ["", "K", "-1", "8X", "1.5M", "99999999999999999999", "99999999999G"] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn what_is_shown_can_be_read_back() {
        for bytes in [1, 8, 1000, 1023, 1024, 1025, 4096, 3 << 20, 1 << 30] {
            assert_eq!(parse(&show(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn ranges_end_where_told() {
        assert_eq!(range(8, 64, 2), Ok(vec![8, 16, 32, 64]));
        assert_eq!(range(8, 63, 4), Ok(vec![8, 32]));
        assert_eq!(range(usize::MAX, usize::MAX, 2), Ok(vec![usize::MAX]));
        assert!(range(8, 4, 2).is_err() && range(8, 16, 1).is_err());
    }

    #[test]
    fn counts_may_have_an_exponent() {
        assert_eq!(parse_count("1e6"), Ok(1_000_000));
        assert_eq!(parse_count("10000"), Ok(10_000));
        assert_eq!([parse_count("100K"), parse_count("2m")], [Ok(100_000), Ok(2_000_000)]);
        assert_eq!(["90", "90s", "5m", "1h", "1e3"].map(parse_time), [90, 90, 300, 3600, 1000].map(Ok));
        for (text, ms) in [("0.5", 500), ("2", 2000), ("500ms", 500), ("5s", 5000), ("1m", 60_000)] {
            assert_eq!(parse_interval(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["0", "0ms", "2d", "25h", "-1", "nan", "", "1.5s"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
        assert!(parse_time("1d").is_err() && parse_time("").is_err());
        assert!(parse_count("1e40").is_err() && parse_count("x").is_err() && parse_count("-3").is_err());
    }
}
