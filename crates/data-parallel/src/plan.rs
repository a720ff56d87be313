//! Which gradients share a bucket.

/// A gradient to be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<K> {
    /// The caller's number for the gradient.
    pub id: usize,
    /// Elements on this rank.
    pub elements: usize,
    /// The groups that it is reduced over. Gradients of different keys never share a bucket.
    pub key: K,
}

/// The gradients of one bucket, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan<K> {
    /// The groups that the bucket is reduced over.
    pub key: K,
    /// Ids, in the order in the bucket.
    pub members: Vec<usize>,
    /// Total number of elements.
    pub elements: usize,
}

/// Fills buckets of up to `max_elements` in the given order; a larger gradient has its own bucket. The order should be
/// that in which gradients become final, so that early buckets are complete early. A bucket stays open for its key
/// until it is full.
///
/// ```
/// use meshwork_data_parallel::{Member, plan};
/// let member = |id, elements, key| Member { id, elements, key };
/// let buckets = plan(&[member(2, 6, "dp"), member(1, 3, "dp+tp"), member(0, 6, "dp")], 10);
/// let members: Vec<_> = buckets.iter().map(|bucket| bucket.members.clone()).collect();
/// assert_eq!(members, [vec![2], vec![1], vec![0]]);
/// ```
pub fn plan<K: Clone + PartialEq>(members: &[Member<K>], max_elements: usize) -> Vec<BucketPlan<K>> {
    let mut buckets: Vec<BucketPlan<K>> = Vec::new();
    for member in members {
        let open = buckets.iter_mut().rfind(|bucket| bucket.key == member.key);
        match open {
            Some(bucket) if bucket.elements + member.elements <= max_elements => {
                bucket.members.push(member.id);
                bucket.elements += member.elements;
            }
            _ => buckets.push(BucketPlan {
                key: member.key.clone(),
                members: vec![member.id],
                elements: member.elements,
            }),
        }
    }
    buckets
}
