#include "device.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace millrace::verbs {

namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
// More than any device allows; the smaller of the two sides' counts.
constexpr int kReadsMax = 16;

struct DeviceList {
    int count = 0;
    ibv_device** devices = ibv_get_device_list(&count);
    ~DeviceList() {
        if (devices) ibv_free_device_list(devices);
    }
};

bool is_mapped_ipv4(const ibv_gid& gid) {
    static constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

// How much a GID table's entry is preferred; 0 for one that cannot be used.
int rank_of(const ibv_gid_entry& entry) {
    if (entry.gid_type != IBV_GID_TYPE_ROCE_V2) return 1;
    return is_mapped_ipv4(entry.gid) ? 3 : 2;
}

}  // namespace

void fail(const std::string& what, int error) { throw VerbsError(what + ": " + std::strerror(error)); }

std::vector<std::string> usable_devices() {
    std::vector<std::string> names;
    DeviceList list;
    for (int i = 0; i < list.count; ++i) {
        try {
            const std::string name = ibv_get_device_name(list.devices[i]);
            Device device(name, -1);
            names.push_back(name);
        } catch (const VerbsError&) {
            // No active port, or not ours to open: there may be another.
        }
    }
    return names;
}

Device::Device(const std::string& name, int gid_index) {
    DeviceList list;
    for (int i = 0; i < list.count && !context_; ++i) {
        if (name == ibv_get_device_name(list.devices[i])) context_.reset(ibv_open_device(list.devices[i]));
    }
    if (!context_) throw VerbsError("RDMA device " + name + " cannot be opened");
    choose_port();
    choose_gid(gid_index);
    domain_.reset(ibv_alloc_pd(context_.get()));
    if (!domain_) fail("ibv_alloc_pd", errno);
}

void Device::choose_port() {
    ibv_device_attr device{};
    if (int error = ibv_query_device(context_.get(), &device)) fail("ibv_query_device", error);
    reads_max_ =
        static_cast<uint8_t>(std::clamp(std::min(device.max_qp_rd_atom, device.max_qp_init_rd_atom), 1, kReadsMax));
    for (uint8_t port = 1; port <= device.phys_port_cnt; ++port) {
        if (ibv_query_port(context_.get(), port, &attributes_) == 0 && attributes_.state == IBV_PORT_ACTIVE) {
            port_ = port;
            return;
        }
    }
    throw VerbsError("the RDMA device has no active port");
}

void Device::choose_gid(int wanted) {
    int best = 0;
    for (int index = 0; index < attributes_.gid_tbl_len; ++index) {
        ibv_gid_entry entry{};
        if ((wanted >= 0 && index != wanted) || ibv_query_gid_ex(context_.get(), port_, index, &entry, 0)) continue;
        if (rank_of(entry) > best) {
            best = rank_of(entry);
            gid_index_ = static_cast<uint8_t>(index);
            std::copy(std::begin(entry.gid.raw), std::end(entry.gid.raw), gid_.begin());
        }
    }
    if (best == 0 && (wanted >= 0 || routed())) throw VerbsError("the RDMA port has no usable address (GID)");
}

Region::Region(std::shared_ptr<Device> device, uint64_t address, uint64_t bytes)
    : device_(std::move(device)), address_(address), bytes_(bytes) {
    region_ = ibv_reg_mr(device_->domain(), reinterpret_cast<void*>(address), bytes, kAccess);
    if (!region_) fail("ibv_reg_mr", errno);
}

Region::Region(std::shared_ptr<Device> device, uint64_t address, uint64_t bytes, int dmabuf, uint64_t offset)
    : device_(std::move(device)), address_(address), bytes_(bytes) {
    region_ = ibv_reg_dmabuf_mr(device_->domain(), offset, bytes, address, dmabuf, kAccess);
    if (!region_) fail("ibv_reg_dmabuf_mr", errno);
}

Region::~Region() { close(); }

void Region::close() {
    if (region_) ibv_dereg_mr(region_);
    region_ = nullptr;
}

}  // namespace millrace::verbs
