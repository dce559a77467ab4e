//! The oracle is libzstd: what we write it reads, and of what it writes or somebody damaged, whatever we read it reads the same way.

use proptest::collection::vec;
use proptest::prelude::*;

use super::{
    CODE_BITS_MAX, Code, Coder, JUMP_TABLE_LEN, SYMBOLS_MAX, Table, decode, encode, header,
};

/// A frame of one block with these literals and nothing else: description (may be empty), jump table, bit strings.
fn frame_of(literals: &[u8], symbols: usize) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x80, 0x38];
    frame.extend(u32::try_from(symbols).unwrap().to_le_bytes());
    let section: u64 = 2 | 3 << 2 | (symbols as u64) << 4 | (literals.len() as u64) << 22;
    let block_len = u32::try_from(5 + literals.len() + 1).unwrap();
    frame.extend(&(1 | 2 << 1 | block_len << 3).to_le_bytes()[..3]);
    frame.extend(&section.to_le_bytes()[..5]);
    frame.extend(literals);
    frame.push(0);
    frame
}

fn libzstd_decodes(literals: &[u8], symbols: usize) -> Option<Vec<u8>> {
    zstd::bulk::decompress(&frame_of(literals, symbols), symbols).ok()
}

fn histogram(symbols: &[u8]) -> [u32; 256] {
    let mut histogram = [0; 256];
    for &symbol in symbols {
        histogram[usize::from(symbol)] += 1;
    }
    histogram
}

fn encoded(kernel: encode::Kernel, code: &Code, symbols: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; SYMBOLS_MAX * 2];
    let len = Coder::with_kernel(kernel).encode(code, symbols, &mut out)?;
    out.truncate(len);
    Some(out)
}

/// What every kernel gives, which is the same.
fn encoded_by_all(code: &Code, symbols: &[u8]) -> Option<Vec<u8>> {
    let want = encoded(encode::Kernel::Portable, code, symbols);
    for kernel in encode::Kernel::available() {
        assert!(
            encoded(kernel, code, symbols) == want,
            "{kernel:?}, {} symbols, {code:?}",
            symbols.len()
        );
    }
    want
}

fn decoded(kernel: decode::Kernel, literals: &[u8], symbols: usize) -> Option<Vec<u8>> {
    let mut table = Table::with_kernel(kernel);
    let described_len = table.read(literals)?;
    let mut out = vec![0; symbols];
    table
        .decode(&literals[described_len..], &mut out)
        .then_some(out)
}

fn decoded_by_all(literals: &[u8], symbols: usize) -> Option<Vec<u8>> {
    let want = decoded(decode::Kernel::Portable, literals, symbols);
    for kernel in decode::Kernel::available() {
        assert!(
            decoded(kernel, literals, symbols) == want,
            "{kernel:?}, {symbols} symbols"
        );
    }
    want
}

fn literals(code: &Code, symbols: &[u8]) -> Vec<u8> {
    [code.header(), &encoded_by_all(code, symbols).unwrap()].concat()
}

/// Symbols around a value, with zeros among them: like a plane of exponents.
fn planes() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![256_usize..3000, Just(SYMBOLS_MAX), 256..=SYMBOLS_MAX];
    (
        len,
        any::<u8>(),
        1_u32..256,
        1_u32..9,
        0_u32..3,
        any::<u64>(),
    )
        .prop_map(|(len, first, alphabet, skew, zeros, seed)| {
            let mut state = seed;
            let mut draw = move |below: u32| {
                state = state
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(0x1405_7b7e_f767_814f);
                ((state >> 33) as u32) % below
            };
            (0..len)
                .map(|_| {
                    if draw(100) < zeros {
                        return 0;
                    }
                    let offset = (0..skew).map(|_| draw(alphabet)).min().unwrap_or(0);
                    first.wrapping_add(u8::try_from(offset).unwrap())
                })
                .collect()
        })
}

fn histograms() -> impl Strategy<Value = [u32; 256]> {
    let count = prop_oneof![Just(0), Just(0), 1_u32..4, 0_u32..1000, any::<u32>()];
    (vec(count, 256), 0_usize..256, 1_usize..257).prop_map(|(counts, first, used)| {
        let mut histogram = [0; 256];
        let stretch = histogram.iter_mut().skip(first).take(used);
        stretch
            .zip(counts)
            .for_each(|(place, count)| *place = count);
        histogram
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_description_gives_the_lengths_back(histogram in histograms()) {
        let used = histogram.iter().filter(|&&count| count > 0).count();
        let Some(code) = Code::of(&histogram) else {
            prop_assert!(used < 2 || histogram[255] > 0);
            return Ok(());
        };
        let (lengths, len) = header::read(code.header()).unwrap();
        prop_assert_eq!(lengths, code.lengths);
        prop_assert_eq!(len, code.header().len());
        for (&count, &length) in histogram.iter().zip(&lengths) {
            prop_assert_eq!(count > 0, length > 0);
            prop_assert!(length <= CODE_BITS_MAX);
        }
        // No code of whole bits is better than the entropy; ours is never worse by a bit and the limit's price.
        let total: f64 = histogram.iter().map(|&count| f64::from(count)).sum();
        let entropy: f64 = histogram.iter().map(|&count| f64::from(count)).filter(|&count| count > 0.0).map(|count| count * (total / count).log2()).sum();
        let cost = code.cost_bits(&histogram).unwrap() as f64;
        prop_assert!(cost >= entropy * 0.999_999 && cost <= entropy + total * 1.1, "{} {} {}", cost, entropy, total);
    }

    #[test]
    fn every_kernel_writes_what_libzstd_reads(symbols in planes()) {
        let Some(code) = Code::of(&histogram(&symbols)) else {
            return Ok(());
        };
        let literals = literals(&code, &symbols);
        prop_assert!(libzstd_decodes(&literals, symbols.len()).as_ref() == Some(&symbols));
        prop_assert!(decoded_by_all(&literals, symbols.len()).as_ref() == Some(&symbols));
        let cost = code.cost_bits(&histogram(&symbols)).unwrap();
        // A bit to end each bit string, and then whole bytes.
        let bits = (literals.len() - code.header().len() - 6) as u64 * 8;
        prop_assert!((cost + 4..=cost + 32).contains(&bits));
    }

    #[test]
    fn a_code_of_a_sample_does_for_the_whole_if_it_knows_every_symbol(symbols in planes(), sampled in 1_usize..200, surprise in any::<u8>(), place in any::<prop::sample::Index>()) {
        let mut symbols = symbols;
        let Some(code) = Code::of(&histogram(&symbols[..sampled])) else {
            return Ok(());
        };
        let is_known = code.cost_bits(&histogram(&symbols)).is_some();
        let literals = encoded_by_all(&code, &symbols).map(|strings| [code.header(), &strings].concat());
        prop_assert_eq!(literals.is_some(), is_known);
        if let Some(literals) = literals {
            prop_assert!(libzstd_decodes(&literals, symbols.len()).as_ref() == Some(&symbols));
        }
        // One symbol anywhere is enough.
        *place.get_mut(&mut symbols) = surprise;
        let is_known = code.cost_bits(&histogram(&symbols)).is_some();
        prop_assert_eq!(encoded_by_all(&code, &symbols).is_some(), is_known);
    }

    #[test]
    fn what_is_read_of_damaged_literals_libzstd_reads_too(symbols in planes(), damage in vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..3), 1..4), missing in 0_usize..40) {
        let symbols = &symbols[..symbols.len().min(4000)];
        let Some(code) = Code::of(&histogram(symbols)) else {
            return Ok(());
        };
        let mut literals = literals(&code, symbols);
        for (place, byte, kind) in damage {
            // The description and the jump table are small; so that they are hit too:
            let near = literals.len().min(if kind == 0 { 12 } else if kind == 1 { 60 } else { usize::MAX });
            *place.get_mut(&mut literals[..near]) = byte;
        }
        if missing < 4 {
            literals.truncate(literals.len() - missing);
        }
        let asked = symbols.len() - if missing > 36 { 1 } else { 0 };
        if let Some(ours) = decoded_by_all(&literals, asked) {
            prop_assert!(libzstd_decodes(&literals, asked).as_ref() == Some(&ours));
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300), asked in 0_usize..2000) {
        if let Some(ours) = decoded_by_all(&bytes, asked) {
            prop_assert!(libzstd_decodes(&bytes, asked).as_ref() == Some(&ours));
        }
    }
}

#[test]
fn bits_of_a_valid_block_flipped_one_by_one() {
    let symbols: Vec<u8> = (0..600_u32)
        .map(|index| 100 + (index * index % 11) as u8)
        .collect();
    let code = Code::of(&histogram(&symbols)).unwrap();
    let literals = literals(&code, &symbols);
    let mut accepted = 0;
    for bit in 0..literals.len() * 8 {
        let mut damaged = literals.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        if let Some(ours) = decoded_by_all(&damaged, symbols.len()) {
            assert_eq!(
                libzstd_decodes(&damaged, symbols.len()),
                Some(ours),
                "bit {bit}"
            );
            accepted += 1;
        }
    }
    // A changed symbol that has the length of the right one is not seen at all, so that the above compared something.
    assert!(accepted > 100, "{accepted}");
}

#[test]
fn every_symbol_without_a_code_is_seen_wherever_it_stands() {
    // Codes for 0 and for a stretch further up, as planes of exponents have them.
    let known: Vec<u8> = (0..2000_u32)
        .map(|index| {
            if index % 50 == 0 {
                0
            } else {
                90 + (index * index % 23) as u8
            }
        })
        .collect();
    let code = Code::of(&histogram(&known)).unwrap();
    assert!(encoded_by_all(&code, &known).is_some());
    for symbol in 0..=u8::MAX {
        for place in [0, 499, 500, 777, 1999] {
            let mut symbols = known.clone();
            symbols[place] = symbol;
            assert_eq!(
                encoded_by_all(&code, &symbols).is_some(),
                known.contains(&symbol),
                "{symbol} at {place}"
            );
        }
    }
}

/// The four bit strings behind a jump table.
fn strings(streams: &[u8]) -> [Vec<u8>; 4] {
    let mut rest = &streams[JUMP_TABLE_LEN..];
    let mut strings = [(); 4].map(|()| Vec::new());
    for (string, len) in strings
        .iter_mut()
        .zip(streams[..JUMP_TABLE_LEN].as_chunks().0)
    {
        let (bytes, behind) = rest.split_at(u16::from_le_bytes(*len).into());
        (*string, rest) = (bytes.to_vec(), behind);
    }
    strings[3] = rest.to_vec();
    strings
}

fn streams(strings: &[Vec<u8>; 4]) -> Vec<u8> {
    let lens = strings[..3]
        .iter()
        .flat_map(|string| u16::try_from(string.len()).unwrap().to_le_bytes());
    lens.chain(strings.iter().flatten().copied()).collect()
}

#[test]
fn a_bit_string_ends_with_its_last_symbol() {
    // 200 symbols in a quarter, 4 more of each kind in the longer one.
    let shorter: Vec<u8> = (0..800_u32)
        .map(|index| 100 + (index % 200 * index % 13) as u8)
        .collect();
    let longer: Vec<u8> = shorter
        .chunks(200)
        .flat_map(|quarter| [&quarter[..1], quarter].concat())
        .collect();
    let code = Code::of(&histogram(&longer)).unwrap();
    let [shorter_strings, longer_strings] =
        [&shorter, &longer].map(|symbols| strings(&encoded_by_all(&code, symbols).unwrap()));
    let decoded = |strings: &[Vec<u8>; 4], symbols: usize| {
        decoded_by_all(&[code.header(), &streams(strings)].concat(), symbols)
    };
    assert_eq!(decoded(&shorter_strings, 800), Some(shorter));
    assert_eq!(decoded(&longer_strings, 804), Some(longer));
    for string in 0..4 {
        let mut mixed = shorter_strings.clone();
        mixed[string] = longer_strings[string].clone();
        assert_eq!(decoded(&mixed, 800), None, "a symbol too many in {string}");
        let mut mixed = longer_strings.clone();
        mixed[string] = shorter_strings[string].clone();
        assert_eq!(decoded(&mixed, 804), None, "a symbol too few in {string}");
        let mut mixed = shorter_strings.clone();
        mixed[string].push(0);
        assert_eq!(decoded(&mixed, 800), None, "no bit to end {string}");
        mixed[string].clear();
        assert_eq!(decoded(&mixed, 800), None, "nothing in {string}");
    }
}

#[test]
fn descriptions_that_are_none() {
    let refused: [(&[u8], &str); 12] = [
        (&[], "nothing"),
        (&[0], "no weights"),
        (&[128 + 2, 0x11], "fewer weights than announced"),
        (&[127 + 2, 0x00], "no symbol"),
        (
            &[127 + 3, 0x22, 0x20],
            "codes shorter than their weights say",
        ),
        (&[127 + 2, 0x13], "a rest that is no power of two"),
        (&[127 + 2, 0xc1], "a weight over 11"),
        (&[127 + 4, 0xbb, 0xbb], "a code over 11 bits"),
        (&[1, 0x00], "a distribution that stops early"),
        (&[4, 0x02, 0xff, 0xff, 0xff], "a table too large"),
        (
            &[3, 0xf0, 0x03, 0x01],
            "a single weight that takes the whole table",
        ),
        (&[200], "only a count"),
    ];
    for (bytes, why) in refused {
        assert!(header::read(bytes).is_none(), "{why}");
    }
    assert!(header::read(&[127 + 3, 0x11, 0x10]).is_some());
}

/// The literals sections with a description in a frame of libzstd's: description, jump table and bit strings, and how many symbols.
fn sections(frame: &[u8]) -> Vec<(&[u8], usize)> {
    let mut found = Vec::new();
    let mut rest =
        &frame[6 + [0, 2, 4, 8][usize::from(frame[4] >> 6)] - usize::from(frame[4] & 0x20 > 0)..];
    loop {
        let head = u32::from_le_bytes([rest[0], rest[1], rest[2], 0]);
        let (kind, len) = (head >> 1 & 3, (head >> 3) as usize);
        let block = &rest[3..][..if kind == 1 { 1 } else { len }];
        // Compressed, with compressed literals in four bit strings with lengths of 18 bits.
        if kind == 2 && block[0] & 15 == 2 | 3 << 2 {
            let section =
                u64::from_le_bytes([block[0], block[1], block[2], block[3], block[4], 0, 0, 0]);
            found.push((
                &block[5..][..(section >> 22) as usize],
                (section >> 4 & 0x3ffff) as usize,
            ));
        }
        rest = &rest[3 + block.len()..];
        if head & 1 == 1 {
            return found;
        }
    }
}

#[test]
fn what_libzstd_writes_is_read() {
    let mut compressor = zstd::bulk::Compressor::new(-1000).unwrap();
    compressor
        .set_parameter(zstd::zstd_safe::CParameter::LiteralCompressionMode(
            zstd::zstd_safe::ParamSwitch::Enable,
        ))
        .unwrap();
    let mut state = 1_u64;
    let mut count = 0;
    for spread in 1..60 {
        let symbols: Vec<u8> = (0..100_000)
            .map(|_| {
                state = state
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(0x1405_7b7e_f767_814f);
                let draw = state >> 20;
                let step = (draw & 0xffff).trailing_ones() * (1 + (draw >> 20) as u32 % spread);
                u8::try_from(90 + step * (spread / 20 + 1) % 160).unwrap()
            })
            .collect();
        let frame = compressor.compress(&symbols).unwrap();
        for (literals, symbols) in sections(&frame) {
            let theirs = libzstd_decodes(literals, symbols).unwrap();
            assert!(
                decoded_by_all(literals, symbols) == Some(theirs),
                "spread {spread}"
            );
            count += 1;
        }
    }
    assert!(count > 40, "{count}");
}

#[test]
fn two_symbols_are_the_fewest() {
    let mut histogram = [0; 256];
    assert!(Code::of(&histogram).is_none());
    histogram[255] = u32::MAX;
    assert!(Code::of(&histogram).is_none());
    histogram[0] = 1;
    assert_eq!(Code::of(&histogram).unwrap().lengths[0], 1);
}

#[test]
fn all_symbols_alike_cannot_be_described() {
    assert!(Code::of(&[7; 256]).is_none());
    let mut histogram = [7; 256];
    histogram[3] = 8 * 7;
    assert!(Code::of(&histogram).is_some());
}

#[test]
fn the_rarest_symbols_take_eleven_bits_and_no_more() {
    let mut histogram = [0; 256];
    let (mut a, mut b) = (1, 1);
    for place in &mut histogram[60..100] {
        *place = a;
        (a, b) = (b, a + b);
    }
    let code = Code::of(&histogram).unwrap();
    assert_eq!(code.lengths.iter().max(), Some(&CODE_BITS_MAX));
    let symbols: Vec<u8> = (0..4000_u32).map(|index| 60 + (index % 40) as u8).collect();
    let literals = literals(&code, &symbols);
    assert!(libzstd_decodes(&literals, symbols.len()) == Some(symbols));
}

#[test]
fn an_output_has_room_or_is_refused() {
    let symbols: Vec<u8> = (0..999_u32).map(|index| (index % 7) as u8).collect();
    let code = Code::of(&histogram(&symbols)).unwrap();
    let strings = encoded_by_all(&code, &symbols).unwrap();
    let mut out = vec![0; strings.len()];
    assert_eq!(
        Coder::new().encode(&code, &symbols, &mut out),
        Some(strings.len())
    );
    assert_eq!(out, strings);
    for len in 0..strings.len() {
        assert_eq!(Coder::new().encode(&code, &symbols, &mut out[..len]), None);
    }
}

#[test]
fn a_table_without_a_code_decodes_nothing() {
    let symbols: Vec<u8> = (0..999_u32).map(|index| (index % 7) as u8).collect();
    let code = Code::of(&histogram(&symbols)).unwrap();
    let strings = encoded_by_all(&code, &symbols).unwrap();
    let mut out = vec![0; symbols.len()];
    let mut table = Table::new();
    assert!(!table.decode(&strings, &mut out));
    assert!(table.read(code.header()).is_some());
    assert!(table.decode(&strings, &mut out));
    assert!(table.read(&[0]).is_none());
    assert!(!table.decode(&strings, &mut out));
}

#[test]
#[should_panic(expected = "255 symbols in a block")]
fn a_block_is_not_too_short() {
    let code = Code::of(&std::array::from_fn(|symbol| u32::from(symbol < 9))).unwrap();
    _ = Coder::new().encode(&code, &[0; 255], &mut [0; 1000]);
}

/// The other tests take every kernel that the CPU can run; this one says whether those were all.
#[test]
#[ignore = "needs a CPU with AVX-512 VBMI"]
fn this_machine_runs_every_kernel() {
    assert_eq!(encode::Kernel::available().len(), 4);
    assert_eq!(decode::Kernel::available().len(), 2);
}
