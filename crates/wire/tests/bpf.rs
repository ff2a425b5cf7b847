//! Classic BPF programs, compared with libpcap's own interpreter: both must select the same frames
//! of `data/hostile-frames.pcap`, whole and truncated anywhere.

use std::path::Path;
use std::process::Command;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapReader, PcapWriter};
use pdp_wire::bpf::BpfProgram;

const FILTERS: [&str; 16] = [
    "ip",
    "ip6",
    "arp",
    "tcp port 80 or udp port 53",
    "vlan",
    "vlan and ip and tcp",
    "host 10.0.0.1 or host 10.0.0.2",
    "net 10.0.0.0/8",
    "src net 10.0.0.0/8 and not dst net 10.0.0.0/8",
    "icmp[icmptype] == icmp-echo",
    "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
    "ip[0] & 0xf > 5",
    "ip6[6] == 58 and len > 60",
    "greater 100 and less 1000",
    "ether broadcast or ether multicast",
    "ether[0:4] * 3 / 7 % 5 ^ 1 == 2 or (ether[5] << 3 >> 1) + ether[4] - ether[3] > 300",
];

fn tcpdump(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("tcpdump").args(arguments).output().expect("tcpdump");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn frames(pcap: &[u8]) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(pcap).expect("pcap");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.expect("a frame").data.into_owned());
    }
    frames
}

#[test]
fn bpf_filters_agree_with_libpcap() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/hostile-frames.pcap");
    let whole = frames(&std::fs::read(data).expect("frames"));
    assert!(whole.len() > 100);
    // Whole and truncated frames, each with its number as the time stamp, for identification.
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("all.pcap");
    let header = PcapHeader { snaplen: 65_535, ..PcapHeader::default() };
    let file = std::fs::File::create(&path).expect("a file");
    let mut writer = PcapWriter::with_header(file, header).expect("a header");
    let mut all: Vec<Vec<u8>> = Vec::new();
    for (number, frame) in whole.iter().enumerate() {
        all.push(frame.clone());
        all.push(frame[..frame.len() * (number % 17) / 17].to_vec());
    }
    for (number, frame) in all.iter().enumerate() {
        let at = std::time::Duration::from_secs(number as u64);
        let packet = PcapPacket::new(at, frame.len() as u32, frame);
        writer.write_packet(&packet).expect("a frame");
    }
    drop(writer);
    let path = path.to_str().expect("a path");
    let mut sums = [0; 2];
    for filter in FILTERS {
        let text = tcpdump(&["-ddd", "-y", "EN10MB", filter]);
        let program: BpfProgram = String::from_utf8(text).expect("text").parse().expect(filter);
        let mut reader_says = Vec::new();
        let expected = tcpdump(&["-r", path, "-w", "-", filter]);
        let mut reader = PcapReader::new(&expected[..]).expect("pcap");
        while let Some(packet) = reader.next_packet() {
            reader_says.push(packet.expect("a frame").timestamp.as_secs() as usize);
        }
        let ours: Vec<usize> =
            (0..all.len()).filter(|number| program.matches(&all[*number])).collect();
        assert_eq!(ours, reader_says, "{filter}");
        sums[0] += ours.len();
        sums[1] += usize::from(!ours.is_empty() && ours.len() < all.len());
    }
    println!(
        "{} frames, {} wanted in all, {} filters tell some apart",
        all.len(),
        sums[0],
        sums[1]
    );
    assert!(sums[1] > FILTERS.len() / 2, "most filters tell some apart: {sums:?}");
}
