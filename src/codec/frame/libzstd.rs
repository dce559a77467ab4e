//! libzstd, and what it is asked for.
//!
//! Both ways twice: a whole chunk at once, as every zstd user does it; and a chunk behind a filter, whose content passes through unit by unit, so that neither side ever
//! holds more than a unit of it. What can fail: making a context, and whatever libzstd says about a frame.

use zstd::zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd::zstd_safe::{
    CCtx, CParameter, DCtx, InBuffer, OutBuffer, ParamSwitch, ResetDirective,
    find_frame_compressed_size, get_error_name,
};

use super::{FILTERED_WINDOW_LOG, FrameError, WINDOW_LOG_MAX};

/// Levels from here on would take a larger window than we allow by themselves.
const WINDOW_CAPPED_FROM_LEVEL: i32 = 20;

pub(super) struct Compressor {
    context: CCtx<'static>,
    /// Whether frames get a content checksum.
    has_checksum: bool,
    /// Level, and whether a filter stands before it.
    set_to: Option<(i32, bool)>,
}

impl Compressor {
    /// `None` when memory is short.
    pub(super) fn new(has_checksum: bool) -> Option<Self> {
        let context = CCtx::try_create()?;
        Some(Self {
            context,
            has_checksum,
            set_to: None,
        })
    }

    /// The context's bytes.
    #[cfg(test)]
    pub(super) fn sizeof(&self) -> usize {
        self.context.sizeof()
    }

    /// Ready for a frame, whatever became of the last one.
    fn start(&mut self, level: i32, filtered: bool) -> Result<(), &'static str> {
        let has_checksum = self.has_checksum;
        let context = &mut self.context;
        context
            .reset(ResetDirective::SessionOnly)
            .map_err(get_error_name)?;
        if self.set_to == Some((level, filtered)) {
            return Ok(());
        }
        self.set_to = None;
        context
            .reset(ResetDirective::Parameters)
            .map_err(get_error_name)?;
        let mut set = |parameter| {
            context
                .set_parameter(parameter)
                .map(drop)
                .map_err(get_error_name)
        };
        set(CParameter::CompressionLevel(level))?;
        set(CParameter::ContentSizeFlag(true))?;
        set(CParameter::ChecksumFlag(has_checksum))?;
        if level < 0 {
            // Fast levels leave literals as they are, and on planes literals are all there is.
            set(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
        }
        if filtered {
            set(CParameter::WindowLog(FILTERED_WINDOW_LOG))?;
        } else if level >= WINDOW_CAPPED_FROM_LEVEL {
            set(CParameter::WindowLog(WINDOW_LOG_MAX))?;
        }
        self.set_to = Some((level, filtered));
        Ok(())
    }

    /// One frame of the whole chunk at the start of `out`; its length. What libzstd says when it does not fit.
    pub(super) fn whole(
        &mut self,
        level: i32,
        chunk: &[u8],
        out: &mut [u8],
    ) -> Result<usize, &'static str> {
        self.start(level, false)?;
        self.context.compress2(out, chunk).map_err(get_error_name)
    }

    /// Starts a frame of `content_len` bytes behind a filter.
    pub(super) fn start_filtered(
        &mut self,
        level: i32,
        content_len: usize,
    ) -> Result<(), &'static str> {
        self.start(level, true)?;
        self.context
            .set_pledged_src_size(Some(content_len as u64))
            .map(drop)
            .map_err(get_error_name)
    }

    /// Takes the next bytes of the content, and writes what is ready to the start of `out`; its length. `None` when it does not fit, or when libzstd refuses.
    pub(super) fn push(&mut self, content: &[u8], is_last: bool, out: &mut [u8]) -> Option<usize> {
        let directive = if is_last {
            ZSTD_EndDirective::ZSTD_e_end
        } else {
            ZSTD_EndDirective::ZSTD_e_continue
        };
        let mut input = InBuffer::around(content);
        let mut output = OutBuffer::around(out);
        loop {
            let before = (input.pos(), output.pos());
            let left = self
                .context
                .compress_stream2(&mut output, &mut input, directive)
                .ok()?;
            let taken = input.pos() == content.len();
            if taken && (!is_last || left == 0) {
                return Some(output.pos());
            }
            if (input.pos(), output.pos()) == before {
                return None;
            }
        }
    }
}

pub(super) struct Decompressor {
    context: DCtx<'static>,
}

impl Decompressor {
    /// `None` when memory is short.
    pub(super) fn new() -> Option<Self> {
        DCtx::try_create().map(|context| Self { context })
    }

    /// The context's bytes.
    #[cfg(test)]
    pub(super) fn sizeof(&self) -> usize {
        self.context.sizeof()
    }

    /// Exactly one frame must lie in these bytes.
    fn check_span(frame: &[u8]) -> Result<(), FrameError> {
        let span = find_frame_compressed_size(frame).map_err(damaged)?;
        if span != frame.len() {
            return Err(FrameError::Span {
                found: span,
                expected: frame.len(),
            });
        }
        Ok(())
    }

    /// Fills `out` with what the frame holds.
    pub(super) fn whole(&mut self, frame: &[u8], out: &mut [u8]) -> Result<(), FrameError> {
        Self::check_span(frame)?;
        let found = self.context.decompress(out, frame).map_err(damaged)?;
        let expected = out.len();
        if found != expected {
            return Err(FrameError::Len { found, expected });
        }
        Ok(())
    }

    /// Starts on a frame whose header was checked, and gives a reader of its content.
    pub(super) fn content<'a>(&'a mut self, frame: &'a [u8]) -> Result<Content<'a>, FrameError> {
        Self::check_span(frame)?;
        self.context
            .reset(ResetDirective::SessionOnly)
            .map_err(damaged)?;
        Ok(Content {
            context: &mut self.context,
            input: InBuffer::around(frame),
            ended: false,
        })
    }
}

/// A frame's content, read piece by piece.
pub(super) struct Content<'a> {
    context: &'a mut DCtx<'static>,
    input: InBuffer<'a>,
    ended: bool,
}

impl Content<'_> {
    /// Fills `out` with the next bytes of the content.
    pub(super) fn read(&mut self, out: &mut [u8]) -> Result<(), FrameError> {
        let expected = out.len();
        let found = self.advance(out)?;
        if found != expected {
            return Err(FrameError::Len { found, expected });
        }
        Ok(())
    }

    /// Nothing may be left but the frame's end.
    pub(super) fn finish(mut self) -> Result<(), FrameError> {
        let found = self.advance(&mut [0])?;
        if found > 0 || !self.ended {
            return Err(FrameError::Len { found, expected: 0 });
        }
        Ok(())
    }

    /// Goes on until `out` is full or the frame is at its end; how much is filled.
    fn advance(&mut self, out: &mut [u8]) -> Result<usize, FrameError> {
        let len = out.len();
        let mut output = OutBuffer::around(out);
        while output.pos() < len && !self.ended {
            let before = (self.input.pos(), output.pos());
            let left = self
                .context
                .decompress_stream(&mut output, &mut self.input)
                .map_err(damaged)?;
            self.ended = left == 0;
            if (self.input.pos(), output.pos()) == before {
                break;
            }
        }
        Ok(output.pos())
    }
}

fn damaged(code: usize) -> FrameError {
    FrameError::Damaged {
        reason: get_error_name(code),
    }
}
