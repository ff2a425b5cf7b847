//! Chooses the best of several builds of an image for this machine.

use serde::Deserialize;

/// System and architecture that an image in an index is for.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Platform {
    os: String,
    architecture: String,
    #[serde(default)]
    variant: Option<String>,
}

impl Platform {
    pub fn of(platform: &oci_spec::image::Platform) -> Self {
        Self {
            os: platform.os().to_string(),
            architecture: platform.architecture().to_string(),
            variant: platform.variant().clone(),
        }
    }

    /// True if system and architecture match the machine, whatever its CPU.
    fn is_ours(&self) -> bool {
        self.os == "linux" && self.architecture == "amd64"
    }

    /// Returns the required micro-architecture level, 1 to 4; `None` for other variants.
    fn level(&self) -> Option<u8> {
        match self.variant.as_deref().unwrap_or_default() {
            "" | "v1" => Some(1),
            "v2" => Some(2),
            "v3" => Some(3),
            "v4" => Some(4),
            _ => None,
        }
    }

    /// Returns the rank on a CPU of this level, lowest first; `None` if it does not run there.
    /// Plain builds come first, so that all machines run the same ones. Builds for newer CPUs come
    /// last, the newest of them first.
    fn rank(&self, cpu: u8) -> Option<u8> {
        let level = self.level().filter(|level| self.is_ours() && *level <= cpu)?;
        Some(match (level, self.variant.as_deref()) {
            (1, None | Some("")) => 0,
            (1, _) => 1,
            _ => 6 - level,
        })
    }
}

/// Returns the images of an index that suit this CPU best. There may be several equally good ones.
/// An image without a platform suits every machine.
pub(super) fn best<T>(images: impl Iterator<Item = (Option<Platform>, T)>) -> Vec<T> {
    best_on(cpu_level(), images)
}

fn best_on<T>(cpu: u8, images: impl Iterator<Item = (Option<Platform>, T)>) -> Vec<T> {
    let rank = |platform: Option<Platform>| platform.map_or(Some(0), |platform| platform.rank(cpu));
    let ranked: Vec<(u8, T)> =
        images.filter_map(|(platform, image)| Some((rank(platform)?, image))).collect();
    let best = ranked.iter().map(|(rank, _)| *rank).min();
    ranked.into_iter().filter(|(rank, _)| Some(*rank) == best).map(|(_, image)| image).collect()
}

/// Describes the platforms of images of which none runs here. The text has no text of the images.
pub(super) fn other(platforms: impl Iterator<Item = Option<Platform>>) -> &'static str {
    let level = |it: Platform| it.is_ours().then(|| it.level()).flatten();
    match platforms.flatten().filter_map(level).min() {
        Some(2..) => "not for linux/amd64 on this CPU, but for newer ones (x86-64-v2 and above)",
        _ => "not for linux/amd64",
    }
}

/// Returns the highest level of this machine's CPU.
fn cpu_level() -> u8 {
    macro_rules! has {
        ($($feature:tt),*) => { $(is_x86_feature_detected!($feature))&&* };
    }
    // LAHF and OSXSAVE are not checked: every CPU with the others has them.
    let second = has!("cmpxchg16b", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3");
    let third = has!("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe");
    let fourth = has!("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl");
    1 + [second, third, fourth].into_iter().take_while(|has| *has).count() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(os: &str, architecture: &str, variant: &str) -> Option<Platform> {
        let variant = Some(variant.to_owned()).filter(|variant| !variant.is_empty());
        Some(Platform { os: os.into(), architecture: architecture.into(), variant })
    }

    #[test]
    fn prefers_plain_build_then_newest_supported_variant() {
        let amd64 = |variant: &'static str| (platform("linux", "amd64", variant), variant);
        let all = ["v3", "v1", "v2", "", "v4", "v9"].map(amd64);
        let others = [
            (platform("linux", "arm64", ""), "arm64"),
            (platform("windows", "amd64", ""), "windows"),
            (platform("unknown", "unknown", ""), "attestation"),
        ];
        let best = |cpu, left_out: &[&str]| {
            let images = all.iter().chain(&others).cloned();
            best_on(cpu, images.filter(|(_, name)| !left_out.contains(name)))
        };
        assert_eq!(best(1, &[]), [""]);
        assert_eq!(best(4, &[]), [""]);
        assert_eq!(best(4, &[""]), ["v1"]);
        assert_eq!(best(4, &["", "v1"]), ["v4"]);
        assert_eq!(best(3, &["", "v1"]), ["v3"]);
        assert_eq!(best(2, &["", "v1"]), ["v2"]);
        assert!(best(1, &["", "v1"]).is_empty());
        assert_eq!(best_on(1, [(None, "a"), amd64(""), amd64("v1")].into_iter()), ["a", ""]);
        let left = || [amd64("v2").0, platform("linux", "arm64", "v8"), None];
        assert!(other(left().into_iter()).contains("newer"));
        assert_eq!(other(left().into_iter().skip(1)), "not for linux/amd64");
    }

    #[test]
    fn detects_the_cpu_level() {
        assert!((1..=4).contains(&cpu_level()));
    }
}
