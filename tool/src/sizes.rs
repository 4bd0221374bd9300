//! Parses numbers as users write them: sizes (`8`, `4K`, `1M`) and their ranges, counts (`100K`,
//! `1e6`) and times (`500ms`, `90s`, `5m`). Options of the same kind accept the same values.
//!
//! Suffixes of sizes are binary (1K = 1024 bytes) and may be written out (`KiB`, `KB`). Suffixes of
//! counts are decimal (1K = 1000).

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
        format!("`{text}` is not a size; use whole bytes, or a number with K, M or G, such as 64K")
    })
}

/// Parses a count, with K, M or G for powers of 1000.
pub fn parse_count<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let count =
        number(text, &[("k", 1000), ("m", 1_000_000), ("g", 1_000_000_000)]).ok_or_else(|| {
            format!("`{text}` is not a count; use a whole number, such as 100000, 100K or 1e6")
        })?;
    T::try_from(count).map_err(|_| format!("`{text}` is too large; use a smaller number"))
}

/// Returns a parser that accepts counts from `least` to `most`.
pub fn count_in<T: TryFrom<u64>>(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| match parse_count(text)? {
        count if (least..=most).contains(&count) => parse_count(text),
        _ if most == u64::MAX => Err(format!("use at least {least}")),
        _ => Err(format!("use from {least} to {most}")),
    }
}

pub const SECONDS_MAX: u64 = 1_000_000;

/// Parses a time: seconds, or a number with ms, s, m or h.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    time_in(text, 1.0).ok_or_else(|| {
        format!(
            "`{text}` is not a time from 1ms to {SECONDS_MAX}s; use seconds, or a time such as \
             500ms, 5s or 1m"
        )
    })
}

/// Parses a time. A number without a suffix is in units of `unit` seconds.
pub fn time_in(text: &str, unit: f64) -> Option<Duration> {
    let text = text.trim().to_ascii_lowercase();
    let suffixes = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let suffixed =
        suffixes.iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)));
    let (number, unit) = suffixed.unwrap_or((&text, unit));
    let seconds = number.parse::<f64>().ok()? * unit;
    (0.001..=SECONDS_MAX as f64).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// Parses a whole number. It may have an exponent (`1e6`) or one of these suffixes, in upper or
/// lower case.
fn number(text: &str, suffixes: &[(&str, u64)]) -> Option<u64> {
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

/// Returns `begin`, `begin * factor` and so on, up to `end`.
pub fn range(begin: usize, end: usize, factor: usize) -> Result<Vec<usize>, String> {
    if factor < 2 {
        return Err(format!("-f {factor}: the factor between sizes is too small; use at least 2"));
    }
    if begin > end {
        return Err(format!(
            "-b {} is above -e {}; use a smaller -b or a larger -e",
            show(begin),
            show(end)
        ));
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

/// Formats a size in the largest unit that divides it, so that [`parse`] accepts it.
pub fn show(bytes: usize) -> String {
    match bytes {
        0 => "0".into(),
        b if b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

/// Formats a time so that [`parse_time`] accepts it: in seconds, or in milliseconds if it has a
/// fraction.
pub fn show_time(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{}s", time.as_secs()),
        _ => format!("{}ms", time.as_millis()),
    }
}

/// Formats a duration with its unit, to three or four digits.
pub fn time(ns: f64) -> String {
    match ns {
        n if n < 1000.0 => format!("{n:.1}ns"),
        n if n < 1e6 => format!("{:.2}us", n / 1e3),
        n if n < 1e9 => format!("{:.2}ms", n / 1e6),
        n => format!("{:.2}s", n / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!([33.46, 1500.0, 2.5e6, 3e9].map(time), ["33.5ns", "1.50us", "2.50ms", "3.00s"]);
    }

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
    fn counts_may_have_an_exponent_or_a_suffix() {
        assert_eq!(parse_count("1e6"), Ok(1_000_000u64));
        assert_eq!(parse_count("10000"), Ok(10_000u32));
        assert_eq!([parse_count("100K"), parse_count("2m")], [Ok(100_000usize), Ok(2_000_000)]);
        for text in ["1e40", "x", "-3", "", "5s"] {
            assert!(parse_count::<u64>(text).unwrap_err().contains("100K"), "{text}");
        }
        assert_eq!(parse_count::<u32>("5G"), Err("`5G` is too large; use a smaller number".into()));
    }

    #[test]
    fn counts_outside_of_their_range_are_refused_with_it() {
        assert_eq!(count_in(2, 1000)("1K"), Ok(1000u32));
        assert_eq!(count_in::<u32>(2, 1000)("1"), Err("use from 2 to 1000".into()));
        assert_eq!(count_in::<u64>(1, u64::MAX)("0"), Err("use at least 1".into()));
    }

    #[test]
    fn times_have_a_unit() {
        for (text, ms) in [
            ("0.5", 500),
            ("2", 2000),
            ("1e3", 1_000_000),
            ("500ms", 500),
            ("5s", 5000),
            ("1.5S", 1500),
            ("1m", 60_000),
            ("25h", 90_000_000),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(ms)), "{text}");
            let shown = show_time(Duration::from_millis(ms));
            assert_eq!(parse_time(&shown), Ok(Duration::from_millis(ms)), "{shown}");
        }
        for text in ["0", "0ms", "2d", "300h", "-1", "nan", "inf", "", "s", "1K"] {
            assert!(parse_time(text).unwrap_err().contains("500ms"), "{text}");
        }
    }
}
