//! The emulated training job: its whole state is bytes in GPU memory, updated step by step.
//!
//! In: a [`Plan`] and the [`DeviceMemory`] it was allocated in. Out: steps and digests. Fails on a CUDA error and on memory that is not
//! this job's state of one moment.
//!
//! A process can be locked between any two CUDA calls, and what stands in its host memory then is lost if the image goes into a fresh
//! process. So memory is cut into blocks of at most 1 MiB, each of which says which step it has reached, and an update is one copy of one
//! block ([`super::layout`]).
//!
//! Step `s` walks all blocks and redoes those whose number is `s - 1`; the header block comes last, so its number is the last step that all
//! blocks have taken. A block's new state follows from its old one, and every `REFRESH_PERIOD`-th step of a block from all its old bytes,
//! from which its new content follows: a byte that came back wrong shows in every later digest.
//! Blocks of zeros stand for unused pools; steps leave them alone. So they do with a block that is too short for number and state.

use twox_hash::xxhash3_128;

use super::TargetError;
use super::args::Plan;
use super::cuda::CudaError;
use super::fill::{fold, mix};
use super::layout::{Block, STAMP_LEN, Stamp, word};

/// Memory on GPUs 0, 1, ... of sizes known to both sides.
pub(crate) trait DeviceMemory {
    /// Copies host memory to `offset` bytes into the memory of a GPU; the copy is done on return.
    fn write(&self, gpu_index: usize, offset: u64, bytes: &[u8]) -> Result<(), CudaError>;
    /// Copies from `offset` bytes into the memory of a GPU; the copy is done on return.
    fn read(&self, gpu_index: usize, offset: u64, bytes: &mut [u8]) -> Result<(), CudaError>;
    /// Returns when all work on a GPU is done.
    fn synchronize(&self, gpu_index: usize) -> Result<(), CudaError>;
}

/// XXH3-128 over the memory of GPU 0, then GPU 1, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(u128);

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A job in GPU memory.
#[derive(Debug)]
pub(crate) struct Job<M> {
    memory: M,
    plan: Plan,
    buffer: Vec<u8>,
}

/// How far the job in an image has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The last step that all blocks have taken.
    pub(crate) step: u64,
    /// Whether no block has begun the next step.
    pub(crate) is_between_steps: bool,
}

impl<M: DeviceMemory> Job<M> {
    /// Fills the memory: the job at step 0. The digest of it comes along if the plan wants digests.
    ///
    /// # Errors
    /// No GPU has the memory for the state of a job that computes; a file cannot be read; a CUDA call failed.
    pub(crate) fn fill(memory: M, plan: Plan) -> Result<(Self, Option<Digest>), TargetError> {
        let mut job = Self::new(memory, plan)?;
        let mut digest = (job.plan.digest_every > 0).then(xxhash3_128::Hasher::new);
        let mut header_block = None;
        let files = job.plan.files()?;
        for block in job.plan.blocks() {
            let bytes = &mut job.buffer[..block.len];
            let state = mix(mix(job.plan.seed, block.gpu_index as u64), !block.index);
            match &files[block.gpu_index] {
                Some(file) => file.read(block.offset, bytes)?,
                None => block.tensor.write(state, bytes),
            }
            if block.is_live() {
                bytes[..STAMP_LEN].copy_from_slice(&Stamp { step: 0, state }.encode());
            }
            if block.is_header {
                job.plan.encode_header(&mut bytes[STAMP_LEN..]);
            }
            if let Some(digest) = &mut digest {
                digest.write(bytes);
            }
            if block.is_header {
                // Written last: memory that was filled in part is no job.
                header_block = Some((block, bytes.to_vec()));
            } else {
                job.memory.write(block.gpu_index, block.offset, bytes)?;
            }
        }
        if let Some((block, bytes)) = header_block {
            job.memory.write(block.gpu_index, block.offset, &bytes)?;
        }
        Ok((job, digest.map(|digest| Digest(digest.finish_128()))))
    }

    /// Takes over the job that an image brought into `memory`: seed, step count and fill come from there,
    /// sizes and pace from `plan`. The first thing it does is a CUDA call, which waits until the process is unlocked.
    ///
    /// # Errors
    /// The memory holds no job, one of other sizes, or blocks of different moments; a CUDA call failed.
    pub(crate) fn resume(memory: M, plan: Plan) -> Result<(Self, Progress), TargetError> {
        let mut job = Self::new(memory, plan)?;
        let Some(header_block) = job.plan.header_block() else {
            job.memory.synchronize(0)?;
            return Ok((
                job,
                Progress {
                    step: 0,
                    is_between_steps: true,
                },
            ));
        };
        let header_end = STAMP_LEN + job.plan.header_len();
        job.memory.read(
            header_block.gpu_index,
            header_block.offset,
            &mut job.buffer[..header_end],
        )?;
        job.plan = job.plan.decode_header(&job.buffer[STAMP_LEN..header_end])?;
        let step = word(&job.buffer, 0);
        let mut is_between_steps = true;
        for block in job
            .plan
            .blocks()
            .filter(|block| block.is_live() && !block.is_header)
        {
            is_between_steps &= job.stamp(&block, step)?.step == step;
        }
        Ok((
            job,
            Progress {
                step,
                is_between_steps,
            },
        ))
    }

    fn new(memory: M, plan: Plan) -> Result<Self, TargetError> {
        let bytes: u64 = plan.gpus.iter().map(|gpu| gpu.bytes).sum();
        if bytes > 0 && plan.step_count != Some(0) && plan.header_block().is_none() {
            return Err(TargetError::NoRoomForState {
                bytes,
                needed: STAMP_LEN + plan.header_len(),
            });
        }
        let buffer_len = plan.blocks().map(|block| block.len).max().unwrap_or(0);
        Ok(Self {
            memory,
            plan,
            buffer: vec![0; buffer_len],
        })
    }

    /// The plan that the job follows.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the memory is only held, without end and without a CUDA call: no step is wanted, or there is nothing to compute on.
    pub(crate) fn is_held_only(&self) -> bool {
        self.plan.step_count == Some(0) || self.plan.header_block().is_none()
    }

    /// Takes the next step and returns its number; `None` when the job has taken its last one, or has no memory to compute on.
    ///
    /// # Errors
    /// The memory is not of one moment; a CUDA call failed.
    pub(crate) fn advance(&mut self) -> Result<Option<u64>, TargetError> {
        let Some(header_block) = self.plan.header_block() else {
            return Ok(None);
        };
        let mut bytes = [0; STAMP_LEN];
        self.memory
            .read(header_block.gpu_index, header_block.offset, &mut bytes)?;
        let done = Stamp::decode(bytes).step;
        if self
            .plan
            .step_count
            .is_some_and(|step_count| done >= step_count)
        {
            return Ok(None);
        }
        for block in self
            .plan
            .blocks()
            .filter(|block| block.is_live() && !block.is_header)
        {
            let stamp = self.stamp(&block, done)?;
            if stamp.step == done {
                self.update(&block, stamp)?;
            }
        }
        let stamp = self.stamp(&header_block, done)?;
        self.update(&header_block, stamp)?;
        Ok(Some(done + 1))
    }

    /// The digest of all memory.
    ///
    /// # Errors
    /// A CUDA call failed.
    pub(crate) fn digest(&mut self) -> Result<Digest, TargetError> {
        let mut digest = xxhash3_128::Hasher::new();
        for block in self.plan.blocks() {
            let bytes = &mut self.buffer[..block.len];
            self.memory.read(block.gpu_index, block.offset, bytes)?;
            digest.write(bytes);
        }
        Ok(Digest(digest.finish_128()))
    }

    /// A live block's number and state; the number is that of the last whole step, or one more.
    fn stamp(&self, block: &Block, done: u64) -> Result<Stamp, TargetError> {
        let mut bytes = [0; STAMP_LEN];
        self.memory
            .read(block.gpu_index, block.offset, &mut bytes)?;
        let stamp = Stamp::decode(bytes);
        if stamp.step != done && stamp.step != done.wrapping_add(1) {
            let Block {
                gpu_index, index, ..
            } = *block;
            return Err(TargetError::Torn {
                gpu_index,
                block_index: index,
                found: stamp.step,
                done,
            });
        }
        Ok(stamp)
    }

    /// Takes a block from the step of its stamp to the next, in one copy to the GPU.
    fn update(&mut self, block: &Block, old: Stamp) -> Result<(), TargetError> {
        let step = old.step + 1;
        if !block.is_refreshed_in(step) {
            let new = Stamp {
                step,
                state: mix(old.state, step),
            };
            return Ok(self
                .memory
                .write(block.gpu_index, block.offset, &new.encode())?);
        }
        let bytes = &mut self.buffer[..block.len];
        self.memory.read(block.gpu_index, block.offset, bytes)?;
        let all = fold(xxhash3_128::Hasher::oneshot(bytes));
        let new = Stamp {
            step,
            state: mix(all, step),
        };
        block.tensor.write(new.state, bytes);
        bytes[..STAMP_LEN].copy_from_slice(&new.encode());
        if block.is_header {
            self.plan.encode_header(&mut bytes[STAMP_LEN..]);
        }
        Ok(self.memory.write(block.gpu_index, block.offset, bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::super::args::GpuPlan;
    use super::super::fill::Fill;
    use super::*;

    /// GPU memory in this process, shared by "processes"; copies to it fail once a limit is reached, as if the process had ended there.
    #[derive(Debug, Clone)]
    struct Fake {
        gpus: Rc<RefCell<Vec<Vec<u8>>>>,
        writes_left: Rc<Cell<u64>>,
    }

    impl Fake {
        fn new(plan: &Plan) -> Self {
            let gpus = plan
                .gpus
                .iter()
                .map(|gpu| vec![0xee; usize::try_from(gpu.bytes).expect("small")])
                .collect();
            Self {
                gpus: Rc::new(RefCell::new(gpus)),
                writes_left: Rc::new(Cell::new(u64::MAX)),
            }
        }

        fn range(offset: u64, len: usize) -> std::ops::Range<usize> {
            let start = usize::try_from(offset).expect("small");
            start..start + len
        }
    }

    impl DeviceMemory for Fake {
        fn write(&self, gpu_index: usize, offset: u64, bytes: &[u8]) -> Result<(), CudaError> {
            let left = self.writes_left.get().checked_sub(1);
            self.writes_left.set(left.ok_or_else(|| CudaError::Call {
                call: "write",
                what: "after the limit".to_owned(),
                code: 999,
                name: String::new(),
            })?);
            self.gpus.borrow_mut()[gpu_index][Self::range(offset, bytes.len())]
                .copy_from_slice(bytes);
            Ok(())
        }

        fn read(&self, gpu_index: usize, offset: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
            bytes.copy_from_slice(&self.gpus.borrow()[gpu_index][Self::range(offset, bytes.len())]);
            Ok(())
        }

        fn synchronize(&self, _gpu_index: usize) -> Result<(), CudaError> {
            Ok(())
        }
    }

    fn plan(gpus: &[(u64, Fill)], step_count: Option<u64>) -> Plan {
        let gpus = gpus
            .iter()
            .map(|(bytes, fill)| GpuPlan {
                bytes: *bytes,
                fill: fill.clone(),
            })
            .collect();
        Plan {
            gpus,
            seed: 7,
            step_count,
            step_pause_ms: 3,
            digest_every: 1,
        }
    }

    /// The digests after steps 0, 1, ... of an uninterrupted run.
    fn digests(plan: &Plan) -> Vec<Digest> {
        let memory = Fake::new(plan);
        let (mut job, first) = Job::fill(memory, plan.clone()).expect("fill");
        let mut digests = vec![first.expect("digests are on")];
        assert_eq!(
            job.digest().expect("digest"),
            digests[0],
            "the digest of the fill is that of the memory"
        );
        while job.advance().expect("advance").is_some() {
            digests.push(job.digest().expect("digest"));
        }
        digests
    }

    fn three_gpus(step_count: u64) -> Plan {
        plan(
            &[
                (0, Fill::Mixed),
                (200_001, Fill::Mixed),
                (70_000, Fill::Weights),
            ],
            Some(step_count),
        )
    }

    #[test]
    fn every_step_changes_the_digest_and_runs_repeat() {
        let plan = three_gpus(20);
        let all = digests(&plan);
        assert_eq!(all.len(), 21);
        for (index, digest) in all.iter().enumerate() {
            assert!(
                !all[..index].contains(digest),
                "step {index} changed nothing"
            );
        }
        assert_eq!(digests(&plan), all);
        assert_ne!(digests(&Plan { seed: 8, ..plan })[0], all[0]);
    }

    #[test]
    fn a_process_that_ends_at_any_copy_is_taken_over() {
        let plan = three_gpus(9);
        let expected = digests(&plan);
        let mut mid_step_count = 0;
        for limit in (0..).step_by(7) {
            let memory = Fake::new(&plan);
            let (mut job, _) = Job::fill(memory.clone(), plan.clone()).expect("fill");
            memory.writes_left.set(limit);
            let end = loop {
                match job.advance() {
                    Ok(Some(_)) => {}
                    other => break other,
                }
            };
            if end.is_ok() {
                break;
            }
            memory.writes_left.set(u64::MAX);
            let same_sizes = Plan {
                seed: 0,
                step_count: None,
                ..plan.clone()
            };
            let (mut job, progress) = Job::resume(memory, same_sizes).expect("resume");
            assert_eq!(
                job.plan(),
                &plan,
                "seed, step count and fill come from the image"
            );
            let mut at = usize::try_from(progress.step).expect("small");
            mid_step_count += usize::from(!progress.is_between_steps);
            if progress.is_between_steps {
                assert_eq!(job.digest().expect("digest"), expected[at]);
            }
            while job.advance().expect("advance").is_some() {
                at += 1;
                assert_eq!(
                    job.digest().expect("digest"),
                    expected[at],
                    "step {at}, ended after {limit} copies"
                );
            }
            assert_eq!(at, 9);
        }
        assert!(
            mid_step_count > 10,
            "only {mid_step_count} ends fell inside a step"
        );
    }

    #[test]
    fn a_wrong_byte_shows_in_every_later_digest() {
        let plan = plan(&[(300_000, Fill::Weights)], Some(20));
        let expected = digests(&plan);
        for place in [1200, 5000, 150_000, 299_999] {
            let memory = Fake::new(&plan);
            let (mut job, _) = Job::fill(memory.clone(), plan.clone()).expect("fill");
            memory.gpus.borrow_mut()[0][place] ^= 1;
            for digest in &expected[1..] {
                job.advance().expect("advance");
                assert_ne!(job.digest().expect("digest"), *digest, "byte {place}");
            }
        }
    }

    #[test]
    fn memory_of_two_moments_is_refused() {
        let plan = three_gpus(9);
        let memory = Fake::new(&plan);
        let (mut job, _) = Job::fill(memory.clone(), plan.clone()).expect("fill");
        let old = memory.gpus.borrow()[2].clone();
        job.advance().expect("first step");
        job.advance().expect("second step");
        memory.gpus.borrow_mut()[2] = old;
        let error = Job::resume(memory, plan).expect_err("GPU 2 is two steps behind");
        assert_eq!(
            error.to_string(),
            "block 0 of GPU 2 is at step 0, but the job at step 2: this memory is not of one moment"
        );
    }

    #[test]
    fn foreign_memory_is_refused() {
        let plan = three_gpus(9);
        let error = Job::resume(Fake::new(&plan), plan.clone()).expect_err("never filled");
        assert!(matches!(error, TargetError::NoJob { .. }), "{error}");

        let memory = Fake::new(&plan);
        Job::fill(memory.clone(), plan.clone()).expect("fill");
        let mut other = plan;
        other.gpus[2].bytes -= 1;
        let error = Job::resume(memory, other).expect_err("other size");
        assert!(
            matches!(
                error,
                TargetError::OtherSize {
                    gpu_index: 2,
                    stored: 70_000,
                    given: 69_999
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn a_file_is_the_memory_byte_for_byte() {
        let raw: Vec<u8> = (0..150_000_u32)
            .map(|index| fold(u128::from(index) << 61).to_le_bytes()[0])
            .collect();
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), &raw).expect("write");
        let fill = Fill::File(file.path().to_owned());
        let held = plan(
            &[(100_000, fill.clone()), (50_000, Fill::Zeros), (100, fill)],
            Some(0),
        );
        let memory = Fake::new(&held);
        let (job, digest) = Job::fill(memory.clone(), held.clone()).expect("fill");
        assert!(job.is_held_only());
        let expected = [&raw[..100_000], &[0; 50_000], &raw[..100]];
        for (gpu, expected) in memory.gpus.borrow().iter().zip(expected) {
            assert!(
                gpu == expected,
                "no header and no stamp lies in held memory"
            );
        }
        let whole = Digest(xxhash3_128::Hasher::oneshot(&expected.concat()));
        assert_eq!(digest, Some(whole));
        let (mut resumed, progress) = Job::resume(memory, held).expect("resume");
        assert_eq!(progress.step, 0);
        assert_eq!(resumed.advance().expect("advance"), None);
        assert_eq!(resumed.digest().expect("digest"), whole);
    }

    #[test]
    fn zeros_stay_zeros_but_for_the_header() {
        let plan = plan(&[(100_000, Fill::Random), (100_000, Fill::Zeros)], Some(3));
        let memory = Fake::new(&plan);
        let (mut job, _) = Job::fill(memory.clone(), plan).expect("fill");
        while job.advance().expect("advance").is_some() {}
        assert!(memory.gpus.borrow()[1].iter().all(|&byte| byte == 0));
        let only_zeros = super::tests::plan(&[(100_000, Fill::Zeros)], Some(3));
        assert_eq!(
            digests(&only_zeros).len(),
            4,
            "the header alone makes the steps differ"
        );
    }

    #[test]
    fn memory_too_small_for_a_state_is_held_but_not_computed_on() {
        for bytes in [0, 1, 15, 63] {
            let held = plan(&[(bytes, Fill::Random)], Some(0));
            let memory = Fake::new(&held);
            let (mut job, digest) = Job::fill(memory.clone(), held.clone()).expect("fill");
            assert_eq!(job.advance().expect("advance"), None);
            assert_eq!(job.digest().expect("digest"), digest.expect("on"));
            let (_, progress) = Job::resume(memory, held).expect("resume");
            assert_eq!(
                progress,
                Progress {
                    step: 0,
                    is_between_steps: true
                }
            );
        }
        let computed = plan(&[(63, Fill::Random)], None);
        let error = Job::fill(Fake::new(&computed), computed.clone()).expect_err("no room");
        assert_eq!(
            error.to_string(),
            "no GPU has the 64 bytes that the state of a job takes (63 in all): raise --bytes or use --steps 0"
        );
        let nothing = plan(&[(0, Fill::Random)], None);
        assert_eq!(
            Job::fill(Fake::new(&nothing), nothing.clone())
                .expect("holds nothing")
                .0
                .advance()
                .expect("advance"),
            None
        );
    }
}
