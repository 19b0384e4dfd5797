//! Placeholders: what is computed of them is found by what stands in their places. Their tokens are the same for all images, so nothing
//! that is found by its tokens may reach into them.

mod common;

use common::{ByRoot, cache, root};
use folio_kv::{BlockHashes, ContentRange, KvCache};

const SIZE: u32 = 4;
const PLACEHOLDER: u32 = 7;

fn image(start: u32, len: u32, content: u8) -> ContentRange {
    ContentRange { start, len, content: [content; 32] }
}

/// Serves `tokens`, with everything checked while it runs and after; what was found, in tokens.
fn serve(cache: &mut KvCache, tokens: &[u32], ranges: &[ContentRange]) -> u32 {
    let hashes = BlockHashes::with_ranges(&root(1), tokens, SIZE, ranges.into());
    let mut copies = Vec::new();
    let mut table = cache.attach(hashes, tokens, tokens.len() as u32 - 1, &mut copies);
    let found = table.computed();
    for computed in found + 1..=tokens.len() as u32 {
        cache.grow(&mut table, computed, &mut copies).expect("room");
        cache.committed(&mut table, tokens, computed);
        cache.check(&[&table]).expect("in order");
    }
    cache.release(table, tokens);
    cache.check(&[]).expect("in order");
    found
}

/// Six tokens of text, `len` placeholders, and `behind` of text.
fn prompt(len: usize, behind: u32) -> Vec<u32> {
    [&[1, 2, 3, 4, 5, 6][..], &vec![PLACEHOLDER; len], &(20..20 + behind).collect::<Vec<_>>()].concat()
}

#[test]
fn the_same_image_is_found_and_another_is_not() {
    let tokens = prompt(12, 7);
    let mut cache = cache(64, SIZE);
    assert_eq!(serve(&mut cache, &tokens, &[image(6, 12, 1)]), 0);
    assert_eq!(serve(&mut cache, &tokens, &[image(6, 12, 1)]), 24, "all but the last token");
    assert_eq!(serve(&mut cache, &tokens, &[image(6, 12, 2)]), 4, "the block before it");
    assert_eq!(serve(&mut cache, &tokens, &[image(6, 12, 2)]), 24);
    assert_eq!(serve(&mut cache, &tokens, &[image(6, 11, 1)]), 16, "less of it, up to its last block");
    assert_eq!(serve(&mut cache, &tokens, &[image(7, 11, 1)]), 4, "one place further on");
}

#[test]
fn in_the_middle_of_an_image_whole_blocks_are_found() {
    let mut cache = cache(64, SIZE);
    serve(&mut cache, &prompt(12, 3), &[image(6, 12, 1)]);
    let mut longer = prompt(12, 3);
    longer[18] = 99;
    assert_eq!(
        serve(&mut cache, &longer, &[image(6, 12, 1)]),
        16,
        "the block in which it ends has other text"
    );
    // The beginning of it, in the last block of which nothing is found by its tokens.
    assert_eq!(serve(&mut cache, &prompt(9, 0), &[image(6, 12, 1)]), 12);
}

/// Whoever has the tokens of placeholders in a text gets none of an image, and an image none of them.
#[test]
fn tokens_of_placeholders_are_not_compared() {
    for len in 1..=9 {
        let tokens = prompt(len, 3);
        let mut cache = cache(64, SIZE);
        assert_eq!(serve(&mut cache, &tokens, &[image(6, len as u32, 1)]), 0);
        assert_eq!(serve(&mut cache, &tokens, &[]), 4, "{len} placeholders");
        assert_eq!(
            serve(&mut cache, &tokens, &[image(6, len as u32, 2)]),
            6,
            "{len} placeholders: the text before"
        );
        let text = serve(&mut cache, &tokens, &[]);
        assert_eq!(text, tokens.len() as u32 - 1, "{len} placeholders");
    }
}
