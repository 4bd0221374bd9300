//! Sizes as users write them: `8`, `4K`, `1M`, lists of them, and ranges by a factor.
//!
//! Suffixes are binary (1K = 1024 bytes) and may be lower case or written out (`KiB`, `KB`).

/// Parses a size in bytes. Zero is allowed; callers that need at least one byte check that.
pub fn parse(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    let number: usize = number.parse().map_err(|_| {
        format!("`{text}` is not a size: write bytes, or a number with K, M or G, such as 8 or 64K")
    })?;
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(format!("`{text}`: unknown suffix `{suffix}`, use K, M or G")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is larger than this machine can address"))
}

/// Parses a count: like a size, but also `1e6`.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is not a count: write a whole number, such as 100000 or 1e6");
    if let Some((mantissa, exponent)) = text.split_once(['e', 'E']) {
        let mantissa: u64 = mantissa.parse().map_err(|_| bad())?;
        let exponent: u32 = exponent.parse().map_err(|_| bad())?;
        return 10u64.checked_pow(exponent).and_then(|p| p.checked_mul(mantissa)).ok_or_else(bad);
    }
    text.parse().map_err(|_| bad())
}

/// `begin`, `begin * factor`, ... up to `end`, which is included when the steps meet it.
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

/// Writes a size the way [`parse`] reads it, in the largest unit that divides it.
pub fn show(bytes: usize) -> String {
    match bytes {
        0 => "0".into(),
        b if b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

/// Reads a time in seconds, from a millisecond to a day.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("use 0.001 to 86400 seconds".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_suffixes() {
        for (text, bytes) in
            [("8", 8), ("4K", 4096), ("4k", 4096), ("1MiB", 1 << 20), ("2g", 2 << 30), ("0", 0), ("7b", 7)]
        {
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
        assert!(parse_count("1e40").is_err() && parse_count("x").is_err() && parse_count("-3").is_err());
    }
}
