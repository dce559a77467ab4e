//! What C gives us, as types: pointers to write through, to read from, and strings.
//!
//! Each is one pointer in the C ABI. Only C callers make them, and they promise what `cuda.h` asks; a null pointer is answered with
//! `INVALID_VALUE`.

use std::ffi::{CStr, c_char};

use crate::codes::{Answer, Code};

/// A pointer through which a result is given.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Refuses a null pointer, before any work is done.
    pub(super) fn require(self) -> Answer<Self> {
        if self.0.is_null() {
            Err(Code::INVALID_VALUE)
        } else {
            Ok(self)
        }
    }

    /// Writes the result; a null pointer is left alone.
    pub(super) fn set(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so the C caller gave a pointer to a T for writing.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Writes the result through a pointer that must not be null.
    pub(super) fn put(self, value: T) -> Answer {
        self.require()?.set(value);
        Ok(())
    }

    /// The same pointer, to the type that an attribute's value has.
    pub(super) fn typed<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes text with its terminating zero, cut to a buffer of `len` bytes.
    pub(super) fn put_text(self, text: &str, len: i32) -> Answer {
        let len = usize::try_from(len).map_err(|_negative| Code::INVALID_VALUE)?;
        if self.0.is_null() || len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = &text.as_bytes()[..text.len().min(len - 1)];
        // SAFETY: the C caller gave a buffer of `len` bytes, and this writes at most that many.
        unsafe {
            self.0
                .copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len());
            self.0.add(bytes.len()).write(0);
        }
        Ok(())
    }
}

/// A pointer from which an argument is read, or to an array of them.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The argument; none if it was left out.
    pub(super) fn get(&self) -> Option<T> {
        // SAFETY: null or, by the C caller's promise, a pointer to a T; every bit pattern of these argument types is valid.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// The first `count` elements.
    pub(super) fn list(&self, count: usize) -> Answer<Vec<T>> {
        list(self.0, count)
    }
}

/// The first `count` elements behind a pointer that C gave, on its own or inside an argument struct.
pub(super) fn list<T: Copy>(pointer: *const T, count: usize) -> Answer<Vec<T>> {
    if pointer.is_null() && count > 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the C caller promises `count` elements behind the pointer.
    Ok((0..count)
        .map(|i| unsafe { pointer.add(i).read_unaligned() })
        .collect())
}

/// A result pointer that came inside an argument struct.
pub(super) fn out_of<T>(pointer: *mut T) -> Out<T> {
    Out(pointer)
}

/// A C string.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Text(*const c_char);

impl Text {
    /// The string.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is missing or not UTF-8.
    pub(super) fn get(&self) -> Answer<&str> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the C caller promises a terminated string that stays for the time of the call.
        unsafe { CStr::from_ptr(self.0) }
            .to_str()
            .map_err(|_not_utf8| Code::INVALID_VALUE)
    }
}
