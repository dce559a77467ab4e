//! The safe face of the CUDA driver.

use std::fmt;

/// A GPU's lasting identity, the 16 bytes of its UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

impl fmt::Display for GpuUuid {
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as `nvidia-smi -L` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.0;
        write!(f, "GPU-")?;
        for (index, byte) in b.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                write!(f, "-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not a UUID of the form `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` (the `GPU-` may be left out).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a GPU UUID; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx as nvidia-smi -L prints it")]
pub struct BadGpuUuid(pub String);

impl std::str::FromStr for GpuUuid {
    type Err = BadGpuUuid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadGpuUuid(text.to_owned());
        let rest = text.strip_prefix("GPU-").unwrap_or(text);
        let groups: Vec<&str> = rest.split('-').collect();
        if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
            return Err(bad());
        }
        let digits: String = groups.concat();
        let value = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        value.map(|value| Self(value.to_be_bytes())).ok_or_else(bad)
    }
}
