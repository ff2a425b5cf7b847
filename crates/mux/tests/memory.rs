//! Heap memory of filters.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pdp_mux::actions::{Actions, ChangeSet, FilterChange, with_capacity};
use pdp_mux::queues::{AtPorts, Queues};
use pdp_proto::slowpath::{FILTERS_MAX, Filter, FilterAction, FilterPattern};

/// The system's allocator, which counts the allocated bytes.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does all, with what it is handed here as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

struct NoQueues;

impl AtPorts for NoQueues {
    fn at(&mut self, _: u8) -> Option<&mut Queues> {
        None
    }

    fn each(&mut self, _: &mut dyn FnMut(&mut Queues)) {}
}

/// Returns the bytes that each filter takes. All possible filters are in
/// force, with patterns of these, while as many replacements are staged.
fn bytes_a_filter(make: impl Fn(&mut Actions), pattern: impl Fn([u8; 4]) -> FilterPattern) -> f64 {
    let before = BYTES.load(Ordering::Relaxed);
    let mut actions = Actions::new(FILTERS_MAX, 0);
    make(&mut actions);
    for round in 0..2 {
        let filter = |id: u32| {
            let pattern = pattern((id ^ round << 31).to_be_bytes());
            FilterChange::Set(Filter { id, priority: 1, pattern, action: FilterAction::default() })
        };
        let mut changes = ChangeSet::default();
        changes.all.extend((0..FILTERS_MAX).map(filter));
        assert!(actions.apply(&mut changes, &mut NoQueues, || true));
        assert_eq!(changes.result, Some(Ok(FILTERS_MAX)));
    }
    let bytes = BYTES.load(Ordering::Relaxed) - before;
    let reported = actions.memory() - size_of::<Actions>();
    assert!(bytes.abs_diff(reported) < bytes / 1000, "{bytes} bytes, and {reported} are said");
    bytes as f64 / f64::from(FILTERS_MAX)
}

/// docs/fastpath.md has the same figures. This is the only
/// test of the file, so that nothing else allocates meanwhile.
#[test]
fn filters_take_the_documented_memory() {
    let short = |at: [u8; 4]| {
        let (mut value, mask) = ([0; 16], [255; 16]);
        value[..4].copy_from_slice(&at);
        FilterPattern::Short { value, mask }
    };
    let long = |at: [u8; 4]| {
        let (mut value, mask) = ([0; 40], [255; 40]);
        value[..4].copy_from_slice(&at);
        FilterPattern::Long { value, mask }
    };
    let bytes = bytes_a_filter(|it| it.short = Some(with_capacity(FILTERS_MAX, 1)), short);
    assert!(bytes < 192.0, "{bytes} of 128 bits");
    let bytes = bytes_a_filter(|it| it.long = Some(with_capacity(FILTERS_MAX, 1)), long);
    assert!(bytes < 288.0, "{bytes} of 320 bits");
}
