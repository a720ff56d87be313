//! Buckets of gradients.

use meshwork_data_parallel::{Member, plan};

#[test]
fn every_member_lies_in_one_bucket_of_its_key_and_none_is_overfull() {
    let members: Vec<Member<u8>> =
        (0..50).map(|id| Member { id, elements: 1 + id * 7 % 13, key: (id % 3) as u8 }).collect();
    let buckets = plan(&members, 20);
    let mut seen: Vec<usize> = buckets.iter().flat_map(|bucket| bucket.members.clone()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..50).collect::<Vec<_>>());
    for bucket in &buckets {
        let sum: usize = bucket.members.iter().map(|&id| members[id].elements).sum();
        assert_eq!(sum, bucket.elements);
        assert!(bucket.elements <= 20);
        assert!(bucket.members.iter().all(|&id| members[id].key == bucket.key));
    }
}

#[test]
fn a_gradient_larger_than_a_bucket_has_one_alone() {
    let members = [3, 100, 4].map(|elements| Member { id: elements, elements, key: () });
    let sizes: Vec<usize> = plan(&members, 10).iter().map(|bucket| bucket.elements).collect();
    assert_eq!(sizes, [3, 100, 4]);
}
