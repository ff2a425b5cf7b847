//! Captures and traces at a time, whichever plane carries the frames: all tenants together have a bound, each tenant has
//! a smaller one, and operators have a part of their own. Only the holder of a [`Place`] asks the mux or the kernel.

use std::sync::{Arc, Mutex};

use pdp_spec::shared::{self, Shared};

use crate::host::HostError;
use crate::reconcile::lock;

/// Those of one sort.
#[derive(Clone, Debug)]
pub struct Observers {
    bounds: &'static Shared,
    /// Tenants of those that there are; `None`: an operator's.
    now: Arc<Mutex<Vec<Option<String>>>>,
}

/// The place of one, given back when dropped.
#[derive(Debug)]
pub struct Place {
    observers: Observers,
    tenant: Option<String>,
}

impl Observers {
    /// Captures.
    pub fn captures() -> Self {
        Self { bounds: &shared::CAPTURES, now: Arc::default() }
    }

    /// Traces.
    pub fn traces() -> Self {
        Self { bounds: &shared::TRACES, now: Arc::default() }
    }

    /// A place for one more, of a tenant or of an operator.
    ///
    /// # Errors
    /// [`HostError::Observed`]: there are too many.
    pub fn place(&self, tenant: Option<&str>) -> Result<Place, HostError> {
        let mut now = lock(&self.now);
        let own = now.iter().filter(|of| of.as_deref() == tenant).count() as u64;
        let tenants = now.iter().flatten().count() as u64;
        let full = match tenant {
            Some(_) if tenants >= self.bounds.tenants() => Some((self.bounds.tenants(), "tenants")),
            Some(_) if own >= self.bounds.tenant => Some((self.bounds.tenant, "a tenant")),
            None if own >= self.bounds.operators => Some((self.bounds.operators, "operators")),
            _ => None,
        };
        if let Some((most, of)) = full {
            return Err(HostError::Observed { what: self.bounds.name, most, of });
        }
        let tenant = tenant.map(str::to_owned);
        now.push(tenant.clone());
        Ok(Place { observers: self.clone(), tenant })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut now = lock(&self.observers.now);
        if let Some(at) = now.iter().position(|tenant| *tenant == self.tenant) {
            now.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_has_all_captures_and_tenants_leave_operators_theirs() {
        for observers in [Observers::captures(), Observers::traces()] {
            let bounds = observers.bounds;
            let mut places: Vec<_> =
                (0..bounds.tenant).map(|_| observers.place(Some("evil")).unwrap()).collect();
            let refused = observers.place(Some("evil")).unwrap_err();
            assert!(matches!(refused, HostError::Observed { of: "a tenant", .. }), "{refused}");
            places.push(observers.place(Some("good")).unwrap());
            let mut tenant = 0;
            let refused = loop {
                tenant += 1;
                match observers.place(Some(&format!("t{tenant}"))) {
                    Ok(place) => places.push(place),
                    Err(refused) => break refused,
                }
            };
            assert!(matches!(refused, HostError::Observed { of: "tenants", .. }), "{refused}");
            assert_eq!(places.len() as u64, bounds.tenants());
            let operators: Vec<_> =
                (0..bounds.operators).map(|_| observers.place(None).unwrap()).collect();
            assert!(observers.place(None).is_err());
            assert_eq!(places.len() + operators.len(), bounds.total.unwrap() as usize);
            places.pop();
            observers.place(Some("good")).unwrap();
        }
    }
}
