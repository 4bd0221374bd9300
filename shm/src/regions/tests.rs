use super::*;

const PEER: Peer = Peer(1);

fn memory() -> NonNull<u8> {
    NonNull::dangling()
}

#[test]
fn a_key_names_its_region_until_it_is_taken_back_and_no_other_afterwards() {
    let mut regions = Regions::new(2);
    let mut old = Vec::new();
    for round in 0..4 * u64::from(GENERATIONS) {
        let key = regions.insert(memory(), round + 1, Owner::User).unwrap();
        assert_eq!(regions.find(key, PEER), Some((memory(), round + 1)));
        for stale in old.iter().rev().take(50) {
            assert_eq!(regions.find(*stale, PEER), None);
            assert!(regions.remove(*stale).is_none());
        }
        assert!(regions.remove(key).is_some());
        old.push(key);
    }
    // Both slots used every generation before a key repeated.
    let first = &old[..2 * usize::from(GENERATIONS)];
    let distinct: std::collections::HashSet<_> = first.iter().collect();
    assert_eq!(distinct.len(), first.len());
}

#[test]
fn a_full_table_says_so_and_foreign_keys_name_nothing() {
    let mut regions = Regions::new(1);
    let key = regions.insert(memory(), 8, Owner::User).unwrap();
    assert_eq!(
        regions.insert(memory(), 8, Owner::User),
        Err(AttachError::Full("ShmConfig::max_regions"))
    );
    for bit in 0..64 {
        assert_eq!(regions.find(key ^ 1 << bit, PEER), None, "bit {bit}");
    }
}

#[test]
fn memory_in_common_with_one_peer_is_nothing_to_another() {
    let mut regions = Regions::new(4);
    let key = regions.insert(memory(), 8, Owner::Peer(PEER, 77)).unwrap();
    assert!(regions.find(key, PEER).is_some());
    assert!(regions.find(key, Peer(2)).is_none());
    regions.remove_common(Peer(2));
    assert!(regions.find(key, PEER).is_some());
    regions.remove_common(PEER);
    assert!(regions.find(key, PEER).is_none());
}
