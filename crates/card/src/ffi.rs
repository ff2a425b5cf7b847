//! The functions of shim/lpm.cpp and shim/header.cpp; the crate's only `unsafe` code.

use std::ffi::c_void;
use std::ptr::NonNull;

/// Inputs of a cycle; the same layout as in shim/lpm.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LpmIn {
    pub(crate) key: [u32; 4],
    pub(crate) wr_data: [u32; 6],
    pub(crate) wr_index: u32,
    pub(crate) token: u16,
    pub(crate) rst: u8,
    pub(crate) valid: u8,
    pub(crate) ve: u8,
    pub(crate) is_v6: u8,
    pub(crate) wr_valid: u8,
    pub(crate) wr_table: u8,
    pub(crate) wr_level: u8,
    pub(crate) wr_ve: u8,
}

/// Outputs after the clock edge; the same layout as in shim/lpm.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LpmOut {
    pub(crate) leaf: u16,
    pub(crate) token: u16,
    pub(crate) valid: u8,
    pub(crate) fault: u8,
    pub(crate) ve: u8,
    pub(crate) wr_refused: u8,
}

/// A variant's functions.
#[derive(Debug)]
pub(crate) struct LpmFunctions {
    new: unsafe extern "C" fn(seed: u32) -> *mut c_void,
    free: unsafe extern "C" fn(handle: *mut c_void),
    step: unsafe extern "C" fn(handle: *mut c_void, input: *const LpmIn, output: *mut LpmOut),
}

macro_rules! variant {
    ($name:ident, $new:ident, $free:ident, $step:ident) => {
        pub(crate) static $name: LpmFunctions = {
            unsafe extern "C" {
                fn $new(seed: u32) -> *mut c_void;
                fn $free(handle: *mut c_void);
                fn $step(handle: *mut c_void, input: *const LpmIn, output: *mut LpmOut);
            }
            LpmFunctions { new: $new, free: $free, step: $step }
        };
    };
}

variant!(SMALL, card_lpm_small_new, card_lpm_small_free, card_lpm_small_step);
variant!(LARGE, card_lpm_large_new, card_lpm_large_free, card_lpm_large_step);

/// An instance of a Verilated model. Neither `Send` nor `Sync`: Verilator keeps the
/// current model's context in a thread-local variable.
#[derive(Debug)]
pub(crate) struct LpmInstance {
    functions: &'static LpmFunctions,
    handle: NonNull<c_void>,
}

impl LpmInstance {
    /// Makes a model whose memories have random contents.
    pub(crate) fn new(functions: &'static LpmFunctions, seed: u32) -> Self {
        // SAFETY: `new` has no preconditions. It never returns null: `operator new` aborts the
        // process instead, as its exception can't pass an `extern "C"` function.
        let handle = unsafe { (functions.new)(seed) };
        Self { functions, handle: NonNull::new(handle).expect("a new model") }
    }

    /// Simulates one clock cycle; returns the outputs after its rising edge.
    pub(crate) fn step(&mut self, input: &LpmIn) -> LpmOut {
        let mut output = LpmOut::default();
        // SAFETY: `handle` is from the same variant's `new` and not freed before `drop`. `&mut
        // self` excludes a second call at the same time. `step` reads one `LpmIn` and writes one
        // `LpmOut`, which have the C structures' layout, and keeps neither pointer.
        unsafe { (self.functions.step)(self.handle.as_ptr(), input, &mut output) };
        output
    }
}

impl Drop for LpmInstance {
    fn drop(&mut self) {
        // SAFETY: `handle` is from the same variant's `new`, and nothing uses it afterwards.
        unsafe { (self.functions.free)(self.handle.as_ptr()) };
    }
}

/// Inputs of a cycle of card_header; the same layout as in shim/header.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeaderPins {
    pub(crate) now: u64,
    /// A `header_in_t`, least significant word first.
    pub(crate) header: [u64; 9],
    pub(crate) wr_data: [u32; 6],
    pub(crate) wr_index: u32,
    pub(crate) rst: u8,
    pub(crate) valid: u8,
    pub(crate) wr_valid: u8,
    pub(crate) wr_table: u8,
    pub(crate) wr_ve: u8,
}

/// Outputs of card_header after the clock edge; the same layout as in shim/header.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeaderResultPins {
    /// A `header_out_t`, least significant word first.
    pub(crate) header: [u64; 9],
    pub(crate) valid: u8,
    pub(crate) fault: u8,
    pub(crate) excess: u8,
    pub(crate) wr_refused: u8,
}

unsafe extern "C" {
    fn card_header_new(seed: u32) -> *mut c_void;
    fn card_header_free(handle: *mut c_void);
    fn card_header_step(
        handle: *mut c_void,
        input: *const HeaderPins,
        output: *mut HeaderResultPins,
    );
}

/// An instance of the Verilated card_header. Neither `Send` nor `Sync`, as [`LpmInstance`].
#[derive(Debug)]
pub(crate) struct HeaderInstance(NonNull<c_void>);

impl HeaderInstance {
    /// Makes a model whose memories have random contents.
    pub(crate) fn new(seed: u32) -> Self {
        // SAFETY: as in `LpmInstance::new`.
        let handle = unsafe { card_header_new(seed) };
        Self(NonNull::new(handle).expect("a new model"))
    }

    /// Simulates one clock cycle; returns the outputs after its rising edge.
    pub(crate) fn step(&mut self, input: &HeaderPins) -> HeaderResultPins {
        let mut output = HeaderResultPins::default();
        // SAFETY: the handle is from `card_header_new` and not freed before `drop`. `&mut self`
        // excludes a second call at the same time. The function reads one `HeaderPins` and writes
        // one `HeaderResultPins`, which have the C structures' layout, and keeps neither pointer.
        unsafe { card_header_step(self.0.as_ptr(), input, &mut output) };
        output
    }
}

impl Drop for HeaderInstance {
    fn drop(&mut self) {
        // SAFETY: the handle is from `card_header_new`, and nothing uses it afterwards.
        unsafe { card_header_free(self.0.as_ptr()) };
    }
}
