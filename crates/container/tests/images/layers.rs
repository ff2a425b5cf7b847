//! Layers in the formats of builders, layers on top of each other, and indexes of several builds.

use super::*;

fn sha256(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn frame(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

fn member(bytes: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(bytes).unwrap();
    gz.finish().unwrap()
}

/// Skippable zstd frame, without content.
const SKIPPABLE: &[u8] = b"\x50\x2a\x4d\x18\x04\0\0\0TOC!";

fn config(diff_ids: &[String]) -> String {
    serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    })
    .to_string()
}

/// Writes an image into a layout and returns its descriptor.
fn put_image(layout: &Path, config: &str, layers: &[Vec<u8>]) -> serde_json::Value {
    let layers: Vec<_> = layers.iter().map(|bytes| blob(layout, "layer.v1.tar", bytes)).collect();
    let manifest = serde_json::json!({
        "schemaVersion": 2, "config": blob(layout, "config.v1+json", config.as_bytes()), "layers": layers,
    });
    blob(layout, "manifest.v1+json", manifest.to_string().as_bytes())
}

fn put_index(layout: &Path, images: &[serde_json::Value]) {
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": images });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
}

/// Unpacks an image from a layout, and stores it as well.
fn unpack(kept: &Kept, config: &str, layers: &[Vec<u8>]) -> Result<PathBuf, String> {
    let layout = kept.0.0.path().join("layout");
    let _ = fs::remove_dir_all(&layout);
    let image = put_image(&layout, config, layers);
    put_index(&layout, &[image]);
    let unpacked =
        image::unpack(&layout, None, &kept.0.images()).map_err(|error| error.to_string());
    let work = kept.1.begin(0).unwrap();
    fill_inbox(&work.inbox(), config.as_bytes(), layers);
    let taken = kept.keep(work);
    match (unpacked, taken) {
        (Ok(root), Ok(_)) => Ok(root),
        (Err(unpacked), Err(taken)) => Err(format!("{unpacked}\n{taken}")),
        (unpacked, taken) => panic!("one of the two is right: {unpacked:?} {taken:?}"),
    }
}

#[test]
fn multi_frame_layers_are_unpacked_completely() {
    let kept = Kept::new();
    let content: Vec<u8> = (0..100_000_u32).map(|number| (number % 251) as u8).collect();
    let tar = layer(&[Entry::File("first", content.clone(), 0), text("last", "last")]);
    let ids = [sha256(&tar)];
    // Within a file, and after its padding, where the tar of the first part seems complete.
    for cut in [50_000, 512 + 100_352] {
        let (one, two) = tar.split_at(cut);
        for (name, packed) in [
            ("zstd", [frame(one), frame(two)].concat()),
            ("pzstd", [SKIPPABLE, &frame(one), SKIPPABLE, &frame(two)].concat()),
            ("chunked", [&frame(one), &frame(two), SKIPPABLE, SKIPPABLE].concat()),
            ("gzip", [member(one), member(two)].concat()),
        ] {
            let root = unpack(&kept, &config(&ids), &[packed]).unwrap();
            let read = |file: &str| fs::read(root.join(file)).unwrap();
            assert!(read("first") == content && read("last") == b"last", "{name} {cut}");
            fs::remove_dir_all(root).unwrap();
        }
    }
}

/// A decoder that leaves something out is detected, and so is the configuration of another image.
#[test]
fn layer_with_wrong_diff_id_is_refused() {
    let kept = Kept::new();
    let tar = layer(&[text("first", "first"), text("last", "last")]);
    let good = sha256(&tar);
    for (diff_ids, why) in [
        (vec![sha256(b"other")], "does not match sha256:"),
        (vec![good.clone(), good.clone()], "it has 2 diff_ids for 1 layers"),
        (vec!["sha512:0".to_owned()], "diff_id sha512:0: only sha256 is known"),
    ] {
        let error = unpack(&kept, &config(&diff_ids), &[frame(&tar)]).unwrap_err();
        assert_eq!(error.matches(why).count(), 2, "{error}");
        let left = fs::read_dir(kept.0.images()).unwrap().flatten();
        let left: Vec<_> = left.filter(|entry| entry.file_name() != image::STORE).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    // Bytes after the archive's end belong to the layer.
    let longer = [&tar[..], &[0; 9000]].concat();
    assert!(unpack(&kept, &config(std::slice::from_ref(&good)), &[longer]).is_err());
    assert!(unpack(&kept, &config(&[good]), &[frame(&tar)]).is_ok());
    assert!(unpack(&kept, "{}", &[member(&tar)]).is_ok(), "a configuration without digests");
}

#[test]
fn layers_follow_lower_links_within_the_image() {
    let dir = Dir::new();
    let root = dir
        .unpack(&[
            layer(&[
                text("usr/lib/base", "base"),
                text("usr/lib/old", "old"),
                text("usr/lib/gone/a", "a"),
                Entry::Symlink("lib", "usr/lib"),
                Entry::Symlink("absolute", "/usr/lib"),
                Entry::Symlink("above", "../../../../usr"),
                Entry::Symlink("chain", "above/lib/deep"),
                Entry::Dir("usr/lib/deep"),
                Entry::Symlink("file", "usr/lib/base"),
            ]),
            layer(&[
                text("lib/extra/hello", "hello"),
                text("lib/.wh.old", ""),
                text("lib/gone/.wh..wh..opq", ""),
                text("absolute/one", "one"),
                text("above/lib/two", "two"),
                text("chain/three", "three"),
                Entry::Hardlink("chain/hard", "absolute/base"),
                // Replaces the link, instead of writing through it.
                text("file", "replaced"),
            ]),
        ])
        .unwrap();
    let read = |path: &str| fs::read_to_string(root.join("usr/lib").join(path)).unwrap();
    for (path, content) in [
        ("extra/hello", "hello"),
        ("one", "one"),
        ("two", "two"),
        ("deep/three", "three"),
        ("deep/hard", "base"),
        ("base", "base"),
    ] {
        assert_eq!(read(path), content, "{path}");
    }
    assert!(!root.join("usr/lib/old").exists());
    assert_eq!(fs::read_dir(root.join("usr/lib/gone")).unwrap().count(), 0);
    assert_eq!(fs::read_link(root.join("lib")).unwrap(), Path::new("usr/lib"));
    assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "replaced");
}

#[test]
fn link_to_non_directory_is_reported() {
    for target in ["nowhere", "loop", "/etc/passwd", "file/x", "/proc/self/root"] {
        let dir = Dir::new();
        let entries =
            [text("file", ""), Entry::Symlink("loop", "loop"), Entry::Symlink("l", target)];
        let error = dir.unpack(&[layer(&entries), layer(&[text("l/x", "y")])]).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("l/x: a parent is a file, or a link to a missing path"), "{error}");
    }
    let dir = Dir::new();
    let error = dir.unpack(&[layer(&[Entry::Hardlink("h", "none")])]).unwrap_err().to_string();
    assert!(error.contains("h: hard link to none: "), "{error}");
}

/// With a link that changes each time, few entries would make many directories. They must be
/// counted.
#[test]
fn directories_behind_links_are_counted_each_time() {
    let kept = Kept::new();
    let deep = "d/".repeat(40);
    let count = |add: &dyn Fn(&mut Builder<Vec<u8>>, u32)| {
        let mut tar = Builder::new(Vec::new());
        for number in 0..20 {
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Directory);
            header.set_size(0);
            tar.append_data(&mut header, format!("{number}"), &[][..]).unwrap();
            add(&mut tar, number);
            let mut header = Header::new_gnu();
            header.set_size(0);
            tar.append_data(&mut header, format!("l/{deep}x"), &[][..]).unwrap();
        }
        let work = kept.1.begin(0).unwrap();
        fill_inbox(&work.inbox(), b"{}", &[tar.into_inner().unwrap()]);
        kept.keep(work)
    };
    let link = |tar: &mut Builder<Vec<u8>>, name: &str, number: u32| {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, name, number.to_string()).unwrap();
    };
    // 20 times 40 directories and the other entries exceed 1,000. They also do if a header gives
    // the name.
    for named in [&b""[..], b"10 path=l\n", b"\0"] {
        let error = count(&|tar, number| match named {
            b"" => link(tar, "l", number),
            [0] => {
                let mut header = Header::new_gnu();
                header.set_entry_type(EntryType::GNULongName);
                header.set_size(2);
                tar.append_data(&mut header, "././@LongLink", &b"l\0"[..]).unwrap();
                link(tar, "other", number);
            }
            pax => {
                let mut header = Header::new_ustar();
                header.set_entry_type(EntryType::XHeader);
                header.set_size(pax.len() as u64);
                tar.append_data(&mut header, "pax", pax).unwrap();
                link(tar, "other", number);
            }
        })
        .unwrap_err();
        assert!(error.contains("bytes, packed and unpacked"), "{error}");
    }
    assert!(count(&|_, _| ()).is_ok(), "the same directories once");
}

#[test]
fn global_pax_header_creates_no_file() {
    let dir = Dir::new();
    let mut tar = Builder::new(Vec::new());
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::XGlobalHeader);
    header.set_size(13);
    tar.append_data(&mut header, "pax_global_header", &b"13 comment=a\n"[..]).unwrap();
    let tar = tar.into_inner().unwrap();
    let root =
        dir.unpack(&[[&tar[..tar.len() - 1024], &layer(&[text("a", "b")])].concat()]).unwrap();
    assert_eq!(fs::read_to_string(root.join("a")).unwrap(), "b");
    assert!(!root.join("pax_global_header").exists());
}

#[test]
fn multi_platform_index_selects_the_plain_build() {
    let dir = Dir::new();
    let layout = dir.0.path().join("layout");
    let build = |mark: &str, platform: serde_json::Value| {
        let mut image = put_image(&layout, "{}", &[layer(&[text("mark", mark)])]);
        image["platform"] = platform;
        image
    };
    let amd64 = |variant: &str| serde_json::json!({ "os": "linux", "architecture": "amd64", "variant": variant });
    let plain = serde_json::json!({ "os": "linux", "architecture": "amd64" });
    let arm64 = serde_json::json!({ "os": "linux", "architecture": "arm64" });
    let unknown = serde_json::json!({ "os": "unknown", "architecture": "unknown" });
    let all = [
        build("attestation", unknown),
        build("arm64", arm64),
        build("v3", amd64("v3")),
        build("v1", amd64("v1")),
        build("plain", plain),
    ];
    let index_of = |images: &[serde_json::Value]| {
        let text = serde_json::json!({ "schemaVersion": 2, "manifests": images }).to_string();
        let mut index = blob(&layout, "index.v1+json", text.as_bytes());
        index["annotations"] =
            serde_json::json!({ "org.opencontainers.image.ref.name": "tools:3" });
        let digest = index["digest"].as_str().unwrap().to_owned();
        put_index(&layout, &[index]);
        // Images of registries are chosen by another function.
        let of_registry = image::of_index(text.as_bytes());
        let root = image::unpack(&layout, Some("tools:3"), &dir.images());
        let root = root.map_err(|error| error.to_string());
        let same = root.as_ref().ok().and_then(|root| root.file_name()?.to_str());
        assert_eq!(
            same,
            of_registry.clone().ok().flatten().map(|it| it.replace(':', "-")).as_deref()
        );
        (digest, root.map(|root| fs::read_to_string(root.join("mark")).unwrap()))
    };
    assert_eq!(index_of(&all).1.as_deref(), Ok("plain"));
    assert_eq!(index_of(&all[..4]).1.as_deref(), Ok("v1"));
    let (digest, none) = index_of(&all[..2]);
    let error = none.unwrap_err();
    assert!(
        error.contains(&format!("index {digest}: its images are not for linux/amd64")),
        "{error}"
    );
    // The names of the layout itself.
    put_index(&layout, &all[4..]);
    assert!(image::check(&layout, None).is_ok());
    let failure =
        |reference: Option<&str>| image::check(&layout, reference).unwrap_err().to_string();
    assert!(failure(Some("x")).contains("index.json: 0 images for linux/amd64 with reference x"));
    put_index(&layout, &[all[4].clone(), all[4].clone()]);
    assert!(failure(None).contains("index.json: 2 images for linux/amd64 with reference (any)"));
    put_index(&layout, &all[1..2]);
    let error = failure(None);
    assert!(error.contains("the image with reference (any) is not for linux/amd64"), "{error}");
}
