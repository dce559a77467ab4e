//! Sizes, rates and times as a person writes them on the command line: `50MiB`, `200MB/s`, `1500ms`.

use std::time::Duration;

/// Parses a byte count: digits, then nothing, `B`, `kB`, `MB`, `GB` (powers of 1000) or `KiB`, `MiB`, `GiB` (powers of 1024).
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|error| {
        format!("`{text}` does not start with a whole number, as in 50MiB: {error}")
    })?;
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => {
            return Err(format!(
                "`{other}` is not a unit of size: use B, kB, MB, GB, KiB, MiB or GiB"
            ));
        }
    };
    number
        .checked_mul(factor)
        .ok_or_else(|| format!("`{text}` is more than 2^64 bytes"))
}

/// Parses a rate in bytes per second: a size, with or without `/s`. Zero is refused.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    let size = text.trim().strip_suffix("/s").unwrap_or(text);
    match parse_size(size)? {
        0 => {
            Err("a rate of 0 would let nothing pass: leave the option out for no limit".to_owned())
        }
        rate => Ok(rate),
    }
}

/// Parses a time: digits, then `ms` or `s`. Zero is refused.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, unit_ms) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1),
        (None, Some(number)) => (number, 1_000),
        (None, None) => return Err(format!("`{text}` has no unit: write it as 1500ms or 3s")),
    };
    let number: u64 = number
        .trim()
        .parse()
        .map_err(|error| format!("`{text}` is not a time such as 1500ms or 3s: {error}"))?;
    match number.checked_mul(unit_ms) {
        Some(0) | None => Err(format!("`{text}` is out of range")),
        Some(ms) => Ok(Duration::from_millis(ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_rates_and_times() {
        assert_eq!(parse_size("7"), Ok(7));
        assert_eq!(parse_size("50MiB"), Ok(50 << 20));
        assert_eq!(parse_size("200 MB"), Ok(200_000_000));
        assert_eq!(parse_rate("200MB/s"), Ok(200_000_000));
        assert_eq!(parse_duration("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("3s"), Ok(Duration::from_secs(3)));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "MiB", "-1", "1.5MiB", "3 parsecs", "99999999999GiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert!(parse_rate("0").is_err());
        for text in ["", "3", "s", "0s", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
