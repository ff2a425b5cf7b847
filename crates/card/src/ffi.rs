//! The functions of shim/model.cpp; the crate's only `unsafe` code.

use std::ffi::c_void;
use std::ptr::NonNull;

/// Structures of ports, which shim/model.cpp copies one after the other.
///
/// # Safety
/// All bytes of the type belong to integers.
pub(crate) unsafe trait Pins: Sized {
    /// Returns pins that are all zero.
    fn zero() -> Self {
        // SAFETY: zero is a value of an integer, and all bytes belong to integers.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! pins {
    ($($module:ident
        $inputs:ident $(<$($in_size:ident),*>)? { $($in:ident: $in_type:ty,)* }
        $outputs:ident $(<$($out_size:ident),*>)? { $($out:ident: $out_type:ty,)* }
    )*) => {$(
        #[repr(C, packed)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $inputs $(<$(const $in_size: usize),*>)? { $(pub(crate) $in: $in_type),* }

        #[repr(C, packed)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $outputs $(<$(const $out_size: usize),*>)? {
            $(pub(crate) $out: $out_type),*
        }

        // SAFETY: the fields are integers and arrays of integers, without padding.
        unsafe impl $(<$(const $in_size: usize),*>)? Pins for $inputs $(<$($in_size),*>)? {}
        // SAFETY: the same.
        unsafe impl $(<$(const $out_size: usize),*>)? Pins for $outputs $(<$($out_size),*>)? {}
    )*};
}

include!("pins.rs");

/// A model's functions; the same layout as `Functions` in shim/model.cpp.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ModelFunctions<I, O> {
    input_bytes: usize,
    output_bytes: usize,
    create: unsafe extern "C" fn(seed: u32) -> *mut c_void,
    destroy: unsafe extern "C" fn(model: *mut c_void),
    settle: unsafe extern "C" fn(model: *mut c_void, inputs: *const I),
    read: unsafe extern "C" fn(model: *mut c_void, outputs: *mut O),
    edge: unsafe extern "C" fn(model: *mut c_void),
}

pub(crate) type WidePins = CardPins<64, 8>;
pub(crate) type WideResultPins = CardResultPins<64, 8>;
#[cfg(card_more)]
pub(crate) type NarrowPins = CardPins<8, 4>;
#[cfg(card_more)]
pub(crate) type NarrowResultPins = CardResultPins<8, 4>;

// SAFETY: build.rs defines these constants from shim/model.cpp. `Instance::new` checks their sizes.
unsafe extern "C" {
    pub(crate) safe static CARD_LPM_SMALL: ModelFunctions<LpmIn, LpmOut>;
    pub(crate) safe static CARD_LPM_LARGE: ModelFunctions<LpmIn, LpmOut>;
    pub(crate) safe static CARD_HEADER: ModelFunctions<HeaderPins, HeaderResultPins>;
    pub(crate) safe static CARD_8: ModelFunctions<WidePins, WideResultPins>;
    #[cfg(card_more)]
    pub(crate) safe static CARD_8_NARROW: ModelFunctions<NarrowPins, NarrowResultPins>;
    #[cfg(card_more)]
    pub(crate) safe static CARD_32: ModelFunctions<WidePins, WideResultPins>;
    #[cfg(card_more)]
    pub(crate) safe static CARD_256: ModelFunctions<WidePins, WideResultPins>;
}

/// An instance of a Verilated model. Neither `Send` nor `Sync`: Verilator keeps the current model's
/// context in a thread-local variable.
#[derive(Debug)]
pub(crate) struct Instance<I: 'static, O: 'static> {
    functions: &'static ModelFunctions<I, O>,
    handle: NonNull<c_void>,
}

impl<I: Pins, O: Pins> Instance<I, O> {
    /// Makes a model whose memories have random contents.
    ///
    /// # Panics
    /// If src/pins.rs does not have the model's ports.
    pub(crate) fn new(functions: &'static ModelFunctions<I, O>, seed: u32) -> Self {
        let sizes = (functions.input_bytes, functions.output_bytes);
        assert_eq!(sizes, (size_of::<I>(), size_of::<O>()), "bytes of the ports in src/pins.rs");
        // SAFETY: `create` has no preconditions. As all five functions, it is `noexcept`: no
        // exception unwinds into Rust; one of `operator new` ends the process.
        let handle = unsafe { (functions.create)(seed) };
        Self { functions, handle: NonNull::new(handle).expect("a new model") }
    }

    /// Simulates one clock cycle; returns the outputs after its rising edge.
    pub(crate) fn step(&mut self, inputs: &I) -> O {
        self.settle(inputs);
        self.edge();
        self.read()
    }

    /// Simulates one clock cycle; returns the outputs before its rising edge.
    pub(crate) fn step_before_edge(&mut self, inputs: &I) -> O {
        self.settle(inputs);
        let outputs = self.read();
        self.edge();
        outputs
    }

    fn settle(&mut self, inputs: &I) {
        // SAFETY: `handle` is from the same model's `create` and not freed before `drop`. `&mut
        // self` excludes a second call at the same time. The function reads `input_bytes` bytes,
        // which `new` has compared with the size of `I`, and keeps no pointer.
        unsafe { (self.functions.settle)(self.handle.as_ptr(), inputs) };
    }

    fn read(&mut self) -> O {
        let mut outputs = O::zero();
        // SAFETY: as in `settle`; the function writes `output_bytes` bytes, the size of `O`.
        // All bytes of `O` belong to integers, so that it may have any contents.
        unsafe { (self.functions.read)(self.handle.as_ptr(), &mut outputs) };
        outputs
    }

    fn edge(&mut self) {
        // SAFETY: as in `settle`.
        unsafe { (self.functions.edge)(self.handle.as_ptr()) };
    }
}

impl<I, O> Drop for Instance<I, O> {
    fn drop(&mut self) {
        // SAFETY: `handle` is from the same model's `create`, and nothing uses it afterwards.
        unsafe { (self.functions.destroy)(self.handle.as_ptr()) };
    }
}
