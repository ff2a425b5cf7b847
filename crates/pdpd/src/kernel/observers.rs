//! Limits of simultaneous captures and traces, regardless of the data plane. All
//! tenants together have a limit, each tenant has a lower one, and operators have
//! one of their own. Only the holder of a [`ObserverPermit`] may ask the mux or the kernel.

use std::sync::{Arc, Mutex};

use pdp_spec::shared::{self, SharedResource};

use crate::host::HostError;
use crate::util::lock;

/// Observers of one kind.
#[derive(Clone, Debug)]
pub struct Observers {
    bounds: &'static SharedResource,
    /// Tenants of the current observers; `None` for an operator's.
    now: Arc<Mutex<Vec<Option<String>>>>,
}

/// Permit of one observer, released when dropped.
#[derive(Debug)]
pub struct ObserverPermit {
    observers: Observers,
    tenant: Option<String>,
}

impl Observers {
    /// Returns the limits of captures.
    pub fn captures() -> Self {
        Self { bounds: &shared::CAPTURES, now: Arc::default() }
    }

    /// Returns the limits of traces.
    pub fn traces() -> Self {
        Self { bounds: &shared::TRACES, now: Arc::default() }
    }

    /// Takes a permit for a tenant or an operator.
    ///
    /// # Errors
    /// [`HostError::Observed`]: the limit is reached.
    pub fn acquire(&self, tenant: Option<&str>) -> Result<ObserverPermit, HostError> {
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
        Ok(ObserverPermit { observers: self.clone(), tenant })
    }
}

impl Drop for ObserverPermit {
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
    fn captures_are_limited_per_tenant_and_for_all() {
        for observers in [Observers::captures(), Observers::traces()] {
            let bounds = observers.bounds;
            let mut places: Vec<_> =
                (0..bounds.tenant).map(|_| observers.acquire(Some("evil")).unwrap()).collect();
            let refused = observers.acquire(Some("evil")).unwrap_err();
            assert!(matches!(refused, HostError::Observed { of: "a tenant", .. }), "{refused}");
            places.push(observers.acquire(Some("good")).unwrap());
            let mut tenant = 0;
            let refused = loop {
                tenant += 1;
                match observers.acquire(Some(&format!("t{tenant}"))) {
                    Ok(place) => places.push(place),
                    Err(refused) => break refused,
                }
            };
            assert!(matches!(refused, HostError::Observed { of: "tenants", .. }), "{refused}");
            assert_eq!(places.len() as u64, bounds.tenants());
            let operators: Vec<_> =
                (0..bounds.operators).map(|_| observers.acquire(None).unwrap()).collect();
            assert!(observers.acquire(None).is_err());
            assert_eq!(places.len() + operators.len(), bounds.total.unwrap() as usize);
            places.pop();
            observers.acquire(Some("good")).unwrap();
        }
    }
}
